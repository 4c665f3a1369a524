"""Replicas that agree without waiting: learners, each a run of its own, and a syncer that merges what they learnt."""
