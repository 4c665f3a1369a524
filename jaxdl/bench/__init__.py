"""Measurements: `python -m jaxdl.bench step --config configs/digits.py`.

Both sides of a comparison run in one process, interleaved; medians of several repeats and their ratio are printed.
"""
