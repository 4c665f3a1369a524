"""How a delta is sent: as float32, or in 8 or 4 bits with a scale for every block, and error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxdl.parallel.asynchrony.outer import Vector

Bits = Literal[4, 8, 32]
"""Bits of a value of a delta on its way to the syncer. Anchors are always sent as float32."""
BLOCK = 256
"""Values that share a scale, which takes 32 bits."""


@dataclass(frozen=True)
class Codec:
    """Turns vectors of `size` float32 values into bytes, little-endian, and back."""

    size: int
    bits: Bits = 32

    @property
    def num_bytes(self) -> int:
        """Length of every encoded vector."""
        return 4 * self.size if self.bits == 32 else self._num_blocks * (4 + BLOCK * self.bits // 8)

    def encode(self, values: Vector) -> bytes:
        """The bytes of a vector; each value is rounded to the nearest multiple of its block's scale."""
        assert values.dtype == np.float32
        assert values.shape == (self.size,)
        if self.bits == 32:
            return values.astype("<f4", copy=False).tobytes()
        padded = np.zeros((self._num_blocks, BLOCK), np.float32)
        padded.reshape(-1)[: self.size] = values
        scales = np.abs(padded).max(axis=1, keepdims=True) * (1.0 / self._most)
        codes = np.rint(padded / np.where(scales > 0, scales, np.float32(1)))
        codes = np.clip(codes, -self._most, self._most).astype(np.int8)
        if self.bits == 4:
            halves = (codes + 8).astype(np.uint8)
            codes = halves[:, 0::2] | (halves[:, 1::2] << 4)
        return scales.astype("<f4").tobytes() + codes.tobytes()

    def decode(self, data: Any) -> Vector:
        """The vector that `num_bytes` bytes stand for. May share the memory of `data`."""
        assert memoryview(data).nbytes == self.num_bytes
        if self.bits == 32:
            return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
        split = 4 * self._num_blocks
        scales = np.frombuffer(data, "<f4", count=self._num_blocks).astype(np.float32)[:, None]
        if self.bits == 8:
            codes = np.frombuffer(data, np.int8, offset=split).reshape(self._num_blocks, BLOCK)
        else:
            pairs = np.frombuffer(data, np.uint8, offset=split).reshape(self._num_blocks, BLOCK // 2)
            codes = np.empty((self._num_blocks, BLOCK), np.int8)
            codes[:, 0::2], codes[:, 1::2] = pairs & 15, pairs >> 4
            codes -= 8
        return (codes.astype(np.float32) * scales).reshape(-1)[: self.size]

    @property
    def _num_blocks(self) -> int:
        return -(-self.size // BLOCK)

    @property
    def _most(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1


class Encoder:
    """Encodes the deltas of one learner; what rounding took from one is added to the next (error feedback)."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.residual: Vector = np.zeros(0 if codec.bits == 32 else codec.size, np.float32)

    def encode(self, delta: Vector) -> tuple[bytes, bool]:
        """`(bytes, whether the delta is finite)`. Zeros are sent for one that is not; the residual stays."""
        if not np.isfinite(delta).all():
            return self.codec.encode(np.zeros(self.codec.size, np.float32)), False
        if self.codec.bits == 32:
            return self.codec.encode(delta), True
        wanted = delta + self.residual
        sent = self.codec.encode(wanted)
        self.residual = wanted - self.codec.decode(sent)
        return sent, True
