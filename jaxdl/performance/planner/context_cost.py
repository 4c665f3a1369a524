"""What it costs to split texts over devices: keys and values of each layer go to all devices that have other parts."""

from __future__ import annotations


def key_bytes(length: float, ways: int, key_width: int, itemsize: int) -> float:
    """Bytes that a device sends in the forward pass of one layer for a text of this length, split `ways` ways.

    It is (P - 1) / P T 2 k h b, whether they go around a ring or are gathered at once.
    """
    return (ways - 1) / ways * length * 2 * key_width * itemsize


def pass_bytes(length: float, ways: int, key_width: int, itemsize: int, *, again: bool = False) -> float:
    """The same of a layer's forward and backward pass, which needs keys and values again and sends their gradients.

    These are float32. With `again` the forward pass is computed twice.
    """
    return (3 if again else 2) * key_bytes(length, ways, key_width, itemsize) + key_bytes(length, ways, key_width, 4)


def pass_messages(ways: int, *, again: bool = False) -> int:
    """Messages, one after the other, of a layer's passes: P - 1 in the forward pass, P + 1 in the other."""
    return (2 if again else 1) * (ways - 1) + (ways + 1 if ways > 1 else 0)
