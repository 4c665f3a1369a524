"""The page of `python -m jaxdl.status --serve`: runs, curves, comparisons, logs, failures, fleets, searches.

Everything is read from workdirs; there is no database. Nothing is changed without a token.
"""
