"""Measurements: `python -m jaxdl.bench step --config configs/digits.py`.

Every field of the experiment is an option, as in `jaxdl.train`. Both sides of a comparison run interleaved in one
process; medians of several repeats and their ratio are printed.
"""
