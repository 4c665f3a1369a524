"""What attacks the listeners of jaxdl, and works beside the attack: see `benchmarks.fuzz_listeners`."""
