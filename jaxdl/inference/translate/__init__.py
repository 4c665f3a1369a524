"""`python -m jaxdl.translate`: texts translated by a trained network."""
