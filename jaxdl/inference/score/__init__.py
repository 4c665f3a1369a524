"""`python -m jaxdl.score`: how likely a language model finds texts and answers."""
