"""What the HTTP servers share: where they listen, who may ask, tokens, refusals. Without JAX and web packages."""
