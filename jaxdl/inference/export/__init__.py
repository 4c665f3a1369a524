"""The command `python -m jaxdl.export`: a trained network is written for other programs."""

FILES = {
    "safetensors": "params.safetensors",
    "stablehlo": "predict.stablehlo",
    "readme": "README.md",
    "columns": "columns.json",
}
"""What is written -> the name of its file; `columns` for a network that reads a table with names."""
