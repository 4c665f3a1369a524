"""The command `python -m jaxdl.predict`: the classes of photographs."""
