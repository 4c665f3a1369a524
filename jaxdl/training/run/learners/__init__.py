"""A run as one learner of several that do not wait for each other."""
