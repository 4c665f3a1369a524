"""What everything stands on: configs and their options, kinds, errors, files, and what runs before JAX is imported."""
