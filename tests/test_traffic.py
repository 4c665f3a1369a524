"""What the exchanges put on the wire, counted in the StableHLO of large gradients; nothing of it runs."""

import json

import pytest

from benchmarks import traffic
from jaxdl.exchange import DeMo, PowerSGD, Quantized, TopK
from jaxdl.exchange.cost import Gradients, Link, Machine, predict
from jaxdl.performance.bench.shared import run_module

NUM_ELEMENTS = 6 * 1_024_000


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("traffic") / "rows.json"
    traffic.main(["--json", str(path), "--num-elements", str(NUM_ELEMENTS)])
    return {row["exchange"]: row for row in json.loads(path.read_text())}


@pytest.mark.slow
def test_dense_is_a_ring_of_shards(rows):
    """Half of the parameters, float32, on each of the two devices of fsdp, each sent 2 (8-1)/8 times."""
    assert rows["dense float32"]["bytes_sent"] == {"replica": 2 * 7 / 8 * NUM_ELEMENTS / 2 * 4, "fsdp": 0}
    assert rows["dense bfloat16"]["of_float32"] == 0.5


@pytest.mark.parametrize(
    ("exchange", "dense", "most"),
    [
        ("topk 0.01 threshold all_gather", "of_bfloat16", 1 / 12),
        ("topk 0.01 threshold all_to_all", "of_bfloat16", 1 / 24),
        ("quantized 8 bits", "of_float32", 0.27),
        ("sign", "of_float32", 1 / 30),
        ("powersgd rank 4", "of_float32", 1 / 60),
        ("demo 32 of 4096", "of_float32", 1 / 31),
    ],
)
def test_compression(rows, exchange, dense, most):
    assert 0 < rows[exchange][dense] <= most
    assert rows[exchange]["bytes_sent"]["fsdp"] == 0


@pytest.mark.parametrize(
    "config", [TopK(algorithm="all_to_all"), Quantized(), PowerSGD(), DeMo()], ids=lambda one: one.label
)
def test_the_metric_says_what_the_program_sends(config):
    """The closed forms that the metrics and the cost model use are those of the program."""
    command = traffic.TrafficBench(num_elements=4 * 1_024_000, replica=4, fsdp=2)
    sent = traffic.exchange_bytes(config, command)["replica"]
    if isinstance(config, PowerSGD):
        expected = 2 * 3 / 4 * 4 * 4 * (1024 + 500) * config.rank
    elif isinstance(config, DeMo):
        expected = config.sent_bytes(4 * 512_000 // 4096, 4)
    else:
        expected = config.sent_bytes(4 * 512_000, 4)
    assert sent == expected


def test_the_cost_counts_the_zeros_that_fill_up_blocks():
    config, command = Quantized(block_size=24_000), traffic.TrafficBench(num_elements=4 * 1_024_000, replica=4, fsdp=2)
    gradients = Gradients({f"layer{number}": (1024, 500) for number in range(4)}, num_replicas=4)
    predicted = predict(config, gradients, Machine({"replica": Link(0.0, 1.0)})).sent_bytes
    assert predicted == traffic.exchange_bytes(config, command)["replica"]
    assert predicted > config.sent_bytes(4 * 512_000, 4)


@pytest.mark.parametrize("args", [["--num-elements", "5000000"], ["--fsdp", "3"], ["--replica", "1"]])
def test_bad_input(args, capsys):
    with pytest.raises(SystemExit) as end:
        run_module(traffic.main, args)
    assert end.value.code == 2
    assert capsys.readouterr().err
