"""A fleet of real runs on emulated nodes."""
