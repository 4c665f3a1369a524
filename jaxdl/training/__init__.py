"""A run: tasks, the state, the step, rounds of replicas, checkpoints, and the experiment from config to result."""
