"""The command `python -m jaxdl.export`: a trained network is written for other programs."""

from jaxdl.training.exported import FORMS

README_FILE, ABOUT_FILE, PROGRAM_FILE = "README.md", "predict.json", "predict.py"
COLUMNS_FILE = "columns.json"
"""Of a network that reads a table with names."""
TOKENIZER_FILE = "tokenizer"
"""Of a network that reads texts, with the suffix of the tokenizer's own file."""
PLACES = (*(form.place for form in FORMS.values()), README_FILE, COLUMNS_FILE, ABOUT_FILE, PROGRAM_FILE)
"""The names of what an export may write into its folder, but for a tokenizer."""
