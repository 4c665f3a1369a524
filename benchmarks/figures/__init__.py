"""The figures of docs/."""
