"""The page `python -m jaxdl.status --serve`: runs, curves, comparisons, logs, failures, fleets and searches in a browser.

Everything is read from workdirs; there is no database. Nothing is changed without a token.
"""
