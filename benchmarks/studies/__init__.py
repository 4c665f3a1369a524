"""Studies: many runs of one config, what they cost and what they learn."""
