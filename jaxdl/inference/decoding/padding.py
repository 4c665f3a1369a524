"""Lengths to which texts are padded: powers of two, so that few programs serve all lengths."""

from __future__ import annotations

SHORTEST = 16
"""Tokens to which the shortest texts are padded."""


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest power of two that is not below a number, at least `least`."""
    return max(least, 1 << (number - 1).bit_length())
