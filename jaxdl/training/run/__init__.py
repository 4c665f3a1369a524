"""The life of a run: built from its config, compiled, trained, rolled back, saved, and ended."""
