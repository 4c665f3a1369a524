"""What is fast and why: the planner, and the benchmarks."""
