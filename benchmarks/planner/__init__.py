"""`bench planner`: what the planner predicts, beside what is measured."""
