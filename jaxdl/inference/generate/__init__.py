"""`python -m jaxdl.generate`: text by a trained language model."""
