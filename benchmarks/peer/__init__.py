"""PyTorch's DistributedDataParallel and jaxdl, with their gradient exchanges, on one emulated cluster."""
