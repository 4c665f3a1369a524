"""Examples that are arrays in memory or in files."""
