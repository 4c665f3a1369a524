"""Several runs share the nodes of a cluster: a policy decides how many each has, and runs are resized by it.

A resize is the trainer's own: it saves on SIGTERM, stops, and the same command resumes on other nodes. See
docs/platform.md.
"""
