"""`python -m jaxdl.serve`: a trained language model behind the interface of OpenAI's server."""
