"""DeMo once more, in NumPy, on the whole gradients of all replicas; see `exchange_oracle`."""

import math

import ml_dtypes
import numpy as np
from exchange_oracle import F32, WIRE_BLOCK, Oracle, in_order


def waves(side):
    """The cosine transform (DCT-II, orthonormal) as a matrix `[frequency, place]`."""
    found = np.array([[math.cos(math.pi * f * (2 * x + 1) / (2 * side)) for x in range(side)] for f in range(side)])
    return found / np.sqrt((found**2).sum(axis=1, keepdims=True))


def largest(coefficients, entries):
    """The chunk with all but its `entries` largest coefficients zero; the first of equal ones."""
    flat = coefficients.ravel()
    kept = np.argsort(-np.abs(flat.astype(F32)), kind="stable")[:entries]
    sparse = np.zeros_like(flat)
    sparse[kept] = flat[kept]
    return sparse.reshape(coefficients.shape)


class DemoOracle(Oracle):
    """The exchange demo: chunks of shards, cut one by one."""

    def is_compressed(self, name):
        sent = self.config.entries * self.num_chunks(name)
        return self.is_large(name) and sent < math.prod(self.local_shape(name))

    def num_chunks(self, name):
        return -(-math.prod(self.local_shape(name)) // self.config.side**2)

    def chunks(self, name, x):
        """A shard's chunks, `[chunk, side, side]`, as views of a copy, and that copy as a shard."""
        side, x = self.config.side, x.astype(np.float64)
        count, rows, columns = self.matrix(name)
        if rows and rows % side == 0 and columns % side == 0:
            matrices = x.reshape(count, rows, columns)
            corners = [(n, i, j) for n in range(count) for i in range(0, rows, side) for j in range(0, columns, side)]
            return [matrices[n, i : i + side, j : j + side] for n, i, j in corners], x
        whole = np.pad(x.ravel(), (0, -x.size % side**2))
        return list(whole.reshape(-1, side, side)), whole[: x.size].reshape(x.shape)

    def flat_bucket(self, names, summand, key):
        del key
        config, wave = self.config, waves(self.config.side)
        used, whole = self.split_axes(names)
        ways = math.prod(self.inner[axis] for axis in whole)
        mean = {name: np.zeros(self.shapes[name], F32) for name in names}
        left = self.zeros(names)
        for coords in self.places(used):
            for name in names:
                where = self.cut(name, coords)
                sent = []
                for r in range(self.m):
                    chunks, shard = self.chunks(name, summand[name][r][where])
                    found = [largest(wave @ chunk @ wave.T, config.entries) for chunk in chunks]
                    sent.append(np.stack(found).astype(self.dtype).astype(np.float64))
                    for chunk, one in zip(chunks, sent[-1], strict=True):
                        chunk -= wave.T @ one @ wave
                    left[name][r][where] = shard
                chunks, shard = self.chunks(name, np.zeros(self.local_shape(name)))
                for chunk, total in zip(chunks, in_order(sent), strict=True):
                    chunk += wave.T @ total @ wave
                mean[name][where] = shard
        self.residual = (self.residual or {}) | left
        own = -(-sum(map(self.num_chunks, names)) // ways)
        self.entries += own * config.entries
        self.elements += -(-sum(math.prod(self.local_shape(name)) for name in names) // ways)
        n = own * config.side**2
        words = own * config.entries + -(-n // WIRE_BLOCK) if config.wire == "packed" else 2 * own * config.entries
        self.sent["replica"] += 4 * (self.m - 1) * words
        for axis in reversed(whole):
            self.sent[axis] += 2 * (self.inner[axis] - 1) * 4 * n
            n *= self.inner[axis]
        return mean

    @property
    def dtype(self):
        """What a coefficient is rounded to."""
        return ml_dtypes.bfloat16 if self.config.wire == "packed" and self.m > 1 else F32
