"""Exchanges on meshes, for tests: made-up gradients, how they lie, and one compiled update for each combination."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdl.exchange import (
    DeMo,
    Dense,
    GradientLayout,
    PowerSGD,
    Quantized,
    Sign,
    TopK,
    by_name,
    exchanged_on_mesh,
    init_on_mesh,
    state_specs,
)

AXES = ("replica", "fsdp", "tensor")

SHAPES = {
    "embed": {"table": (24, 16)},
    "layers": {"kernel": (2, 16, 32), "mix": (16, 20)},
    "odd": {"kernel": (9, 35)},
    "out": {"bias": (24,), "kernel": (32, 24)},
    "temperature": (),
}
"""Large and small ones, stacked layers, an odd number of elements, a scalar."""

SPECS = {
    "embed": {"table": P("tensor", "fsdp")},
    "layers": {"kernel": P(None, "fsdp", "tensor"), "mix": P("tensor")},
    "odd": {"kernel": P()},
    "out": {"bias": P(), "kernel": P(("tensor", "fsdp"))},
    "temperature": P(),
}
"""How they lie where the mesh has all axes: split over both, one or no axis inside a replica."""

FAST_COMPILE = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # Later ones do not know the option.
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False
"""Each program runs a few times on little data: compiling it is what takes time."""

ORDER = ("out/bias", "out/kernel", "layers/mix", "layers/kernel", "temperature", "odd/kernel", "embed/table")
STACKED = frozenset({"layers/kernel"})


def is_shape(node):
    return isinstance(node, tuple)


def is_spec(node):
    return isinstance(node, P)


NAMED_SHAPES = dict(zip(by_name(SPECS), jax.tree.leaves(SHAPES, is_leaf=is_shape), strict=True))
"""A gradient's name -> its whole shape."""


def tree_of(named):
    """The tree of what `by_name` gives the names of."""
    return jax.tree.unflatten(jax.tree.structure(SPECS, is_leaf=is_spec), [named[name] for name in NAMED_SHAPES])


@dataclass(frozen=True)
class Place:
    """A mesh, and whether gradients are split inside a replica."""

    replica: int
    fsdp: int = 1
    tensor: int = 1
    whole: bool = False
    """Every device inside a replica holds the gradients whole, and the exchange shares them out."""

    @property
    def sizes(self):
        return {"replica": self.replica, "fsdp": self.fsdp, "tensor": self.tensor}

    @property
    def inner(self):
        return {axis: size for axis, size in self.sizes.items() if axis != "replica" and size > 1}

    @property
    def mesh(self):
        shape = tuple(self.sizes.values())
        return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), AXES)

    @property
    def specs(self):
        """The tree of PartitionSpecs, without the axes that this mesh does not have."""

        def kept(entry):
            names = tuple(a for a in (entry if isinstance(entry, tuple) else (entry,)) if a in self.inner)
            return names[0] if len(names) == 1 else names or None

        return jax.tree.map(
            lambda spec: P() if self.whole else P(*(kept(entry) for entry in spec)), SPECS, is_leaf=is_spec
        )

    @property
    def layout(self):
        return GradientLayout(specs=by_name(self.specs), inner=self.inner, order=ORDER, stacked=STACKED)


PLACES = {
    "replica 8": Place(8),
    "replica 4 x fsdp 2": Place(4, 2),
    "replica 2 x fsdp 2 x tensor 2": Place(2, 2, 2),
    "replica 4 x fsdp 2, whole": Place(4, 2, whole=True),
}

COMMON = {"min_elements": 100}
SMALL = {"min_elements": 100, "bucket_mib": 0.004}
"""With buckets of about a thousand elements, so that there are more of them."""

EXCHANGES = {
    "dense": Dense(bucket_mib=0.004),
    "dense bfloat16": Dense(wire_dtype="bfloat16"),
    "dense float16": Dense(wire_dtype="float16"),
    "topk exact": TopK(density=0.1, method="exact", wire="plain", **COMMON),
    "topk exact, all to all": TopK(density=0.1, method="exact", algorithm="all_to_all", wire="plain", **COMMON),
    "topk threshold": TopK(density=0.05, method="threshold", **SMALL),
    "topk threshold, all to all": TopK(density=0.1, method="threshold", algorithm="all_to_all", **COMMON),
    "topk mstopk": TopK(density=0.1, method="mstopk", **COMMON),
    "topk mstopk, all to all": TopK(density=0.1, method="mstopk", algorithm="all_to_all", **COMMON),
    "topk block": TopK(density=0.1, method="block", **SMALL),
    "topk block, all to all": TopK(density=0.1, method="block", algorithm="all_to_all", wire="plain", **COMMON),
    "quantized 8": Quantized(bits=8, error_feedback=True, block_size=64, **COMMON),
    "quantized 4": Quantized(bits=4, error_feedback=True, block_size=16, **COMMON),
    "quantized 2": Quantized(bits=2, block_size=32, **COMMON),
    "sign": Sign(block_size=64, **COMMON),
    "powersgd": PowerSGD(rank=2, **COMMON),
    "demo": DeMo(side=8, entries=6, momentum=0.9, **COMMON),
    "demo plain": DeMo(side=16, entries=20, momentum=0.9, wire="plain", **SMALL),
}


class Run:
    """One exchange in one place: its update as a compiled function of arrays on the mesh."""

    def __init__(self, config, place, dtype="float32"):
        self.config, self.place = config, place
        both = [jnp.dtype("float32"), jnp.dtype("bfloat16")] if dtype == "mixed" else [jnp.dtype(dtype)]
        self.dtypes = {name: both[number % len(both)] for number, name in enumerate(NAMED_SHAPES)}
        self.mesh, self.specs = place.mesh, place.specs
        self.exchange = config.build(place.layout)
        shapes = tree_of({name: jax.ShapeDtypeStruct(NAMED_SHAPES[name], x) for name, x in self.dtypes.items()})
        self.state_specs = state_specs(self.exchange, shapes, self.specs, self.mesh)
        self.stacked = jax.tree.map(lambda spec: P("replica", *spec), self.specs, is_leaf=is_spec)
        self._init = jax.jit(lambda: init_on_mesh(self.exchange, shapes, self.specs, self.mesh))
        self.update = exchanged_on_mesh(self.exchange, self.specs, self.state_specs, self.mesh)
        gradients = self.on_mesh(self.gradients(0))
        self.lowered = jax.jit(self.update).lower(gradients, self.init(), jax.random.key(0))
        self.compiled = self.lowered.compile(compiler_options=FAST_COMPILE)

    def init(self):
        """A fresh state, on the mesh."""
        return self._init()

    def gradients(self, seed):
        """Whole gradients of all replicas, name -> `[replica, *shape]`, of very different sizes."""
        generator = np.random.default_rng(seed)
        return {
            name: (generator.standard_normal((self.place.replica, *shape)) * 10.0 ** (number % 3 - 1)).astype(
                self.dtypes[name]
            )
            for number, (name, shape) in enumerate(NAMED_SHAPES.items())
        }

    def on_mesh(self, gradients):
        """The tree of gradients, laid out."""
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec)), tree_of(gradients), self.stacked
        )

    def __call__(self, gradients, state, seed):
        """`(mean, state, metrics)` of one update, all on the mesh."""
        return self.compiled(self.on_mesh(gradients), state, jax.random.key(seed))


def assert_same_everywhere(x):
    """Devices that should hold the same part of a result do, bit by bit."""
    parts = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert all(len(contents) == 1 for contents in parts.values())


@functools.cache
def run_of(exchange, place, dtype="float32"):
    """The run of a named exchange in a named place; compiled once for all tests."""
    return Run(EXCHANGES[exchange], PLACES[place], dtype)
