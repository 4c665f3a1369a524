"""All measurements of one GPU, in one command."""
