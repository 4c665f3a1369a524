"""The command `python -m jaxdl.export`: a trained network is written for other programs."""

README_FILE, ABOUT_FILE, PROGRAM_FILE = "README.md", "predict.json", "predict.py"
COLUMNS_FILE = "columns.json"
"""Of a network that reads a table with names."""
TOKENIZER_FILE = "tokenizer"
"""Of a network that reads texts, with the suffix of the tokenizer's own file."""
