"""Where the tables and the work of a run go, and why."""
