"""What the makers of jaxdl measure and draw; see README.md. It is not in the package: run it from a checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""
