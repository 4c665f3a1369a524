"""The gradient exchanges once more, in NumPy, on the whole gradients of all replicas: no mesh and no collectives.

It cuts the shards itself, puts them into buckets, selects by sorting, and adds up. JAX serves for random keys alone.
"""

import itertools
import math

import jax
import ml_dtypes
import numpy as np

F32 = np.float32
WIRE_BLOCK = 65536
ZERO = np.uint32(0)


def spec_axes(spec):
    return {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}


def cut(spec, sizes, coords, shape):
    """The slices of a shard: `coords` are a device's places on the axes, `sizes` those of the mesh."""
    slices = []
    for dim, size in enumerate(shape):
        entry = spec[dim] if dim < len(spec) else None
        ways, place = 1, 0
        for axis in entry if isinstance(entry, tuple) else (entry,) if entry else ():
            ways, place = ways * sizes[axis], place * sizes[axis] + coords[axis]
        slices.append(slice(size // ways * place, size // ways * (place + 1)))
    return tuple(slices)


class Oracle:
    """One exchange. `specs` (name -> PartitionSpec) and the sizes of the inner axes say how gradients lie."""

    def __init__(self, config, *, shapes, specs, inner, order, num_replicas, stacked=(), factors=None):
        self.config, self.shapes, self.specs, self.inner = config, shapes, specs, inner
        self.stacked, self.m = stacked, num_replicas
        self.order = sorted(shapes, key=order.index)
        self.kind = config.kind
        self.compressed = [name for name in self.order if self.kind != "dense" and self.is_compressed(name)]
        feedback = self.kind != "dense" and config.error_feedback
        # Of a small shard too, which two thin matrices would not make smaller.
        self.residual = self.zeros([name for name in self.order if self.is_large(name)]) if feedback else None
        self.correction = getattr(config, "momentum_correction", None)
        self.momentum = None if self.correction is None else self.zeros(self.order)
        self.factors = factors

    def zeros(self, names):
        return {name: np.zeros((self.m, *self.shapes[name]), F32) for name in names}

    def is_large(self, name):
        return math.prod(self.shapes[name]) >= max(self.config.min_elements, 1)

    def is_compressed(self, name):
        if not self.is_large(name) or self.kind != "powersgd":
            return self.is_large(name)
        _, rows, columns = self.matrix(name)
        return self.config.rank * (rows + columns) < rows * columns

    def local_shape(self, name):
        return tuple(one.stop - one.start for one in self.cut(name, dict.fromkeys(self.inner, 0)))

    def cut(self, name, coords):
        return cut(self.specs[name], self.inner, coords, self.shapes[name])

    def matrix(self, name):
        shape = self.local_shape(name)
        count, shape = (shape[0], shape[1:]) if name in self.stacked else (1, shape)
        cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
        return count, *(min(cuts, key=lambda cut: (sum(cut), -cut[0])) if cuts else (0, 0))

    def buckets(self, names):
        """Lists of names that lie alike: first those that were full, in the order in which they got so."""
        limit = math.inf if self.kind == "powersgd" and names == self.compressed else self.config.bucket_mib * 2**18
        full, filling = [], {}
        for name in names:
            split = frozenset(spec_axes(self.specs[name]) & self.inner.keys())
            there = sum(math.prod(self.local_shape(one)) for one in filling.get(split, []))
            if there and there + math.prod(self.local_shape(name)) > limit:
                full.append(filling.pop(split))
            filling.setdefault(split, []).append(name)
        return full + list(filling.values())

    def places(self, axes):
        """The coordinates of all devices of some axes, the last one running fastest."""
        ranges = (range(self.inner[axis]) for axis in axes)
        return [dict(zip(axes, place, strict=True)) for place in itertools.product(*ranges)]

    def step(self, gradients, key):
        """`(mean, metrics)` of `gradients`, name -> `[replica, *shape]`; what remains is in `self.residual`."""
        shares = {name: g.astype(F32) / F32(self.m) for name, g in gradients.items()}
        summand = shares
        if self.momentum is not None:
            self.momentum = {name: F32(self.correction) * self.momentum[name] + shares[name] for name in shares}
            summand = self.momentum
        if self.residual is not None:
            decay = F32(self.config.unsent_decay)
            summand = summand | {name: summand[name] + decay * x for name, x in self.residual.items()}
        self.sent = dict.fromkeys(("replica", *self.inner), 0.0)
        self.entries = self.elements = 0
        mean = {}
        dense = [name for name in self.order if name not in self.compressed]
        for names in self.buckets(dense):
            mean |= self.dense_bucket(names, summand)
        for number, names in enumerate(self.buckets(self.compressed)):
            one = self.factored_bucket if self.kind == "powersgd" else self.flat_bucket
            mean |= one(names, summand, jax.random.fold_in(key, number))
        rounded = {name: mean[name].astype(gradients[name].dtype) for name in gradients}
        for name in self.residual or {}:
            if name not in self.compressed:
                self.residual[name] = np.zeros_like(self.residual[name])
            self.residual[name] += (mean[name] - rounded[name].astype(F32)) / F32(self.m)
        return rounded, self.metrics(shares)

    def metrics(self, shares):
        def norm(arrays):
            return math.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in arrays.values()))

        slow = self.sent["replica"]
        residual = norm(self.residual or {})
        return {f"bytes_sent/{axis}": value for axis, value in self.sent.items()} | {
            "density": self.entries / self.elements,
            "compression": 2 * (self.m - 1) / self.m * 4 * self.elements / slow if self.m > 1 else 1,
            "residual_norm": residual,
            "residual_ratio": residual / max(norm(shares), 1e-30),
        }

    def split_axes(self, names):
        split = spec_axes(self.specs[names[0]])
        return [a for a in self.inner if a in split], [a for a in self.inner if a not in split]

    def count(self, names, times):
        """The elements that one device exchanges; `times` all-gathers of them over the axes they lie whole on."""
        _, whole = self.split_axes(names)
        own = -(-sum(math.prod(self.local_shape(name)) for name in names) // math.prod(self.inner[a] for a in whole))
        size = 4 * own
        for axis in reversed(whole):
            self.sent[axis] += times * (self.inner[axis] - 1) * size
            size *= self.inner[axis]
        return own

    def dense_bucket(self, names, summand):
        own = self.count(names, 1)
        wire = np.dtype(ml_dtypes.bfloat16) if self.wire == "bfloat16" else np.dtype(self.wire)
        padded = own if wire.itemsize == 4 else -(-own // self.m) * self.m
        self.sent["replica"] += 2 * (self.m - 1) / self.m * padded * wire.itemsize
        self.entries, self.elements = self.entries + own, self.elements + own
        return {name: summand[name].astype(wire).astype(np.float64).sum(axis=0).astype(F32) for name in names}

    @property
    def wire(self):
        return self.config.wire_dtype if self.kind == "dense" else "float32"

    def flat_bucket(self, names, summand, key):
        """Each device's part of the flat bucket, with the same part of the other replicas."""
        used, whole = self.split_axes(names)
        ways = math.prod(self.inner[axis] for axis in whole)
        own = self.count(names, 1 + (self.residual is not None) + (self.momentum is not None))
        mean = {name: np.zeros(self.shapes[name], F32) for name in names}
        for used_number, coords in enumerate(self.places(used)):
            flat = [np.concatenate([summand[n][r][self.cut(n, coords)].ravel() for n in names]) for r in range(self.m)]
            flat = np.pad(flat, ((0, 0), (0, own * ways - len(flat[0]))))
            parts = []
            for number in range(ways):
                device_key = jax.random.fold_in(key, used_number * ways + number) if self.inner else key
                parts.append(self.exchanged(flat[:, number * own : (number + 1) * own], device_key))
            total, error, chosen = (np.concatenate([part[i] for part in parts], axis=-1) for i in range(3))
            start = 0
            for name in names:
                where, shape = self.cut(name, coords), self.local_shape(name)
                here = slice(start, start + math.prod(shape))
                start = here.stop
                mean[name][where] = total[here].reshape(shape)
                for r in range(self.m):
                    if self.residual is not None:
                        self.residual[name][r][where] = error[r, here].reshape(shape)
                    if self.momentum is not None:
                        self.momentum[name][r][where][chosen[r, here].reshape(shape)] = 0
        self.elements += own
        if self.kind == "topk":
            k = num_kept(own, self.config.density)
            self.entries += k
            self.sent["replica"] += sparse_bytes(self.config, k, own, self.m)
        else:
            bits = 1 if self.kind == "sign" else self.config.bits
            num_blocks, block = quantized_blocks(own + self.padding(own), self.m, self.config.block_size)
            self.entries += own
            self.sent["replica"] += 2 * (self.m - 1) * num_blocks * (block * bits // 8 + 4)
        return mean

    def exchanged(self, rows, key):
        """`(total [n], errors [m, n], which entries were chosen [m, n])` of the summands of m replicas."""
        if self.kind == "topk":
            return sparse_sum(rows, self.config, key)
        bits, n = 1 if self.kind == "sign" else self.config.bits, rows.shape[1]
        rows = np.pad(rows, ((0, 0), (0, self.padding(n))))
        total, errors = quantized_sum(rows, bits, self.config.block_size, key)
        return total[:n], errors[:, :n], np.ones((self.m, n), bool)

    def padding(self, n):
        """Zeros at the end of a large bucket, so that every range has whole blocks."""
        unit = self.m * self.config.block_size
        return -n % unit if n >= 16 * unit else 0

    def factored_bucket(self, names, summand, key):
        used, whole = self.split_axes(names)
        rank, ways = self.config.rank, math.prod(self.inner[axis] for axis in whole)
        matrices = [self.matrix(name) for name in names]
        self.elements += -(-sum(count * rows * columns for count, rows, columns in matrices) // ways)
        for size in ([c * rows * rank for c, rows, _ in matrices], [c * columns * rank for c, _, columns in matrices]):
            own = -(-sum(size) // ways)
            self.entries += own
            self.sent["replica"] += 2 * (self.m - 1) / self.m * 4 * own
            for axis in reversed(whole):
                self.sent[axis] += (self.inner[axis] - 1) * 4 * own
                own *= self.inner[axis]
        mean = {name: np.zeros(self.shapes[name], F32) for name in names}
        for name in names:
            count, rows, columns = self.matrix(name)
            for coords in self.places(used):
                where, place = self.cut(name, coords), tuple(coords.values())
                own = np.stack([summand[name][r][where] for r in range(self.m)])
                matrices = own.reshape(self.m, count, rows, columns).astype(np.float64)
                factor = self.factors[name][place]
                left = np.linalg.qr(matrices.sum(axis=0) @ factor)[0]
                right = np.swapaxes(matrices.sum(axis=0), 1, 2) @ left
                self.factors[name][place] = right
                approximated = (left @ np.swapaxes(right, 1, 2)).reshape(own.shape[1:])
                mean[name][where] = approximated
                for r in range(self.m):
                    if self.residual is not None:
                        # What the common left factor cannot say of this replica's own matrix.
                        rest = matrices[r] - left @ (np.swapaxes(left, 1, 2) @ matrices[r])
                        self.residual[name][r][where] = rest.reshape(own.shape[1:])
        return mean


def num_kept(n, density):
    return min(n, max(1, math.ceil(density * n)))


def sparse_sizes(k, n, m):
    """Of the all-to-all: (positions in a row that one owner has, positions, entries to one owner, sums it keeps)."""
    chunk = min(64, -(-n // m))
    positions = -(-n // (chunk * m)) * chunk
    room = min(k, positions, math.ceil(1.25 * k / m + 4 * math.sqrt(k / m)))
    return chunk, positions, room, min(positions, -(-k // m))


def sparse_bytes(config, k, n, m):
    def words(count, size):
        return count + -(-size // WIRE_BLOCK) if config.wire == "packed" else 2 * count

    if config.algorithm == "all_gather":
        return 4 * (m - 1) * words(k, n)
    _, positions, room, kept = sparse_sizes(k, n, m)
    return 4 * (m - 1) * (words(room, positions) + words(kept, positions))


def select(x, k, method, key):
    """Which k entries are selected, ascending."""
    size = np.abs(x)
    if method == "block":
        blocks = np.array_split(np.arange(len(x)), k)
        return np.array([block[np.argmax(size[block])] for block in blocks])
    if method == "mstopk":
        last = np.sort(size)[-k]
        # Its thresholds lie between mean and maximum; below the mean all are alike to it.
        mean = size.mean()
        sure = size > last if last > mean else size > mean
        band = np.flatnonzero(size == last if last > mean else ~sure)
        wanted = k - sure.sum()
        start = int(jax.random.randint(key, (), 0, len(band) - wanted + 1))
        return np.sort(np.concatenate([np.flatnonzero(sure), band[start : start + wanted]]))
    keys = size.astype(F32).view(np.int32).astype(np.int64)
    if method == "threshold":  # It looks at the exponent and 16 bits of the mantissa.
        keys >>= 7
    return np.sort(np.argsort(-keys, kind="stable")[:k])


def sparse_sum(rows, config, key):
    m, n = rows.shape
    k = num_kept(n, config.density)
    chosen = np.zeros((m, n), bool)
    keys = [jax.random.split(jax.random.fold_in(key, replica)) for replica in range(m)]
    for replica in range(m):
        chosen[replica, select(rows[replica], k, config.method, keys[replica][0])] = True

    def sent(x):
        return x.astype(ml_dtypes.bfloat16).astype(F32) if config.wire == "packed" else x

    if config.algorithm == "all_gather":
        messages = np.where(chosen, sent(rows), 0)
        return in_order(messages), rows - messages, chosen
    chunk, positions, room, kept = sparse_sizes(k, n, m)
    owner = np.arange(n) // chunk % m
    for replica, position in itertools.product(range(m), range(m)):
        chosen_here = np.flatnonzero(chosen[replica] & (owner == position))
        chosen[replica, chosen_here[room:]] = False  # No room: it stays in the error.
    messages = np.where(chosen, sent(rows), 0)
    sums = in_order(messages)
    total, errors = np.zeros(n, F32), rows - messages
    for position in range(m):
        mine = np.zeros(positions, F32)
        here = np.flatnonzero(owner == position)
        mine[: len(here)] = sums[here]
        places = select(mine, kept, config.method, keys[position][1])
        places = places[places < len(here)]
        total[here[places]] = sent(mine[places])
        errors[position, here] += sums[here] - total[here]
    return total, errors, chosen


def in_order(rows):
    """The sum in float32, one row after the other."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def quantized_blocks(n, m, block_size):
    """(blocks in a range, entries in a block)."""
    wanted = -(-n // m)
    num_blocks = -(-wanted // block_size)
    return num_blocks, 8 * -(-wanted // (8 * num_blocks))


def quantized_sum(rows, bits, block_size, key):
    m, n = rows.shape
    num_blocks, block = quantized_blocks(n, m, block_size)
    words = np.asarray(jax.random.key_data(key), np.uint32)[-2:]
    padded = np.pad(rows, ((0, 0), (0, m * num_blocks * block - n))).reshape(m, m * num_blocks, block)
    real = (np.arange(m * num_blocks * block) < n).reshape(m * num_blocks, block)
    kept = np.stack([quantized(padded[r], real, bits, words, 2 * r) for r in range(m)])
    sums = np.where(real, in_order(kept), 0)
    errors, total = padded - kept, np.zeros_like(sums)
    for owner in range(m):
        here = slice(owner * num_blocks, (owner + 1) * num_blocks)
        total[here] = quantized(sums[here], real[here], bits, words, 2 * owner + 1)
        errors[owner, here] += sums[here] - total[here]
    return total.reshape(-1)[:n], errors.reshape(m, -1)[:, :n]


def quantized(x, real, bits, words, stream):
    """What `[block, entry]` is read as at the other end."""
    if bits == 1:
        scale = np.abs(x).sum(axis=1, keepdims=True) / np.maximum(real.sum(axis=1, keepdims=True), 1)
        return (np.where(x >= 0, 1, -1) * scale).astype(F32)
    top = 2 ** (bits - 1) - 1
    scale = np.abs(x).max(axis=1, keepdims=True) / F32(top)
    levels = np.clip(x * np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0).astype(F32), -top, top)
    down = np.floor(levels)
    return ((down + (random_numbers(x.shape, words, stream) < levels - down)) * scale).astype(F32)


def random_numbers(shape, words, stream):
    """The hash that rounds at random: `triple32` (Wellons 2018) of the index, with two seeds for each stream."""
    with np.errstate(over="ignore"):
        stream = mixed(np.uint32(stream))
        one, other = words
        first = mixed(one + mixed(other + stream))
        second = mixed(other ^ mixed(one ^ ~stream))
        index = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
        return (mixed(index ^ first, second) >> np.uint32(8)).astype(F32) * F32(2.0**-24)


def mixed(x, second=ZERO):
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    x = x ^ (x >> np.uint32(11))
    x = (x + second) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x ^ (x >> np.uint32(14))
