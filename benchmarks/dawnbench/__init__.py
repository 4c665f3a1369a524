"""ImageNet in the form of DAWNBench."""
