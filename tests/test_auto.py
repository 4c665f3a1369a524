"""The exchange that is chosen by the network."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Dense, GradientLayout, PowerSGD, Quantized, Sign, TopK
from jaxdl.exchange.auto import Auto
from jaxdl.parallel.mesh import Axis, MeshConfig, make_mesh

EIGHT = MeshConfig(replica=8, fsdp=1)
SHAPES = {"stem/kernel": (1024, 1024), "head/kernel": (1024, 2048), "bias": (1024,)}


def choose(auto, mesh=EIGHT, layout=None):
    return auto.choose(SHAPES, layout or GradientLayout(), make_mesh(mesh))


def test_a_slow_network_gets_compression_and_a_fast_one_none():
    slow, fast = (choose(Auto(bandwidth_gbps=gbps, latency_us=50)) for gbps in (0.1, 400))
    assert isinstance(slow.best, TopK)
    assert slow.reasons[0].startswith("chose topk 0.01 threshold")
    assert "(given" in slow.reasons[1]
    assert isinstance(fast.best, Dense)
    assert any("do not compress" in line for line in fast.reasons)
    assert slow == choose(Auto(bandwidth_gbps=0.1, latency_us=50)), "nothing is measured, so nothing may change"


def test_only_candidates_are_chosen():
    given = {"bandwidth_gbps": 0.1, "latency_us": 50}
    assert isinstance(choose(Auto(candidates=("quantized",), **given)).best, Quantized)
    assert isinstance(choose(Auto(candidates=("sign",), **given)).best, Sign)
    assert isinstance(choose(Auto(candidates=("powersgd", "quantized"), **given)).best, PowerSGD)
    assert choose(Auto(candidates=("float16",), **given)).best == Dense(wire_dtype="float16")
    assert choose(Auto(densities=(0.02, 0.001), **given)).best.density == 0.001
    assert isinstance(choose(Auto(min_speedup=1000, **given)).best, Dense)


def test_axes_inside_a_replica_are_counted():
    mesh = MeshConfig(replica=2, fsdp=2, tensor=2)
    layout = GradientLayout(specs={"stem/kernel": P(Axis.FSDP.value)}, inner={Axis.FSDP.value: 2, Axis.TENSOR.value: 2})
    chosen = choose(Auto(bandwidth_gbps=0.1, latency_us=0), mesh, layout)
    assert isinstance(chosen.best, TopK)
    assert chosen.best.algorithm == "all_gather"


def test_a_single_replica_exchanges_nothing():
    chosen = choose(Auto(bandwidth_gbps=1, latency_us=50), MeshConfig(replica=1, fsdp=8))
    assert chosen.best == Dense()
    assert "one replica" in chosen.reasons[1]


@pytest.mark.slow
def test_measured_on_these_devices():
    chosen = Auto(candidates=("quantized",)).choose(
        {"kernel": (256, 256)}, GradientLayout(), make_mesh(MeshConfig(replica=4, fsdp=2))
    )
    assert isinstance(chosen.best, Dense | Quantized)
    assert "(measured)" in chosen.reasons[1]
    assert callable(chosen.best.build().update)
    assert jax.device_count() == 8


def test_it_is_no_exchange_itself():
    with pytest.raises(ConfigError, match="only selects an exchange"):
        Auto().build()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bandwidth_gbps": 25}, "bandwidth_gbps = 25 without latency_us"),
        ({"latency_us": 5}, "latency_us = 5 without bandwidth_gbps"),
        ({"candidates": ()}, "nothing to choose from"),
        ({"candidates": ("topk", "topk")}, "named twice"),
        ({"candidates": ("dense",)}, "candidates"),
        ({"candidates": ("quantized",), "densities": (0.1,)}, "topk is no candidate"),
        ({"densities": (0.0,)}, "above 0"),
        ({"min_speedup": 0.5}, "min_speedup"),
    ],
)
def test_settings_that_cannot_take_effect_are_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        Auto(**fields)


def test_it_is_a_config():
    auto = Auto(candidates=("topk",), densities=(0.001, 0.01))
    assert Auto.from_json(auto.to_json()) == auto
    assert auto.kind == "auto"
