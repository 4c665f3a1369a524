"""Measurements: `python -m jaxdl.bench step --config configs/digits.py`.

Every field of the experiment is an option, as of `jaxdl.train`. Both sides of a comparison run in one process,
interleaved; medians of several repeats and their ratio are printed.
"""
