"""A kind of exchange that jaxdl does not know: its config says all that is asked about it."""

import subprocess
import sys
from pathlib import Path

import pytest
from runs import tiny_experiment

from benchmarks.schedule import ScheduleBench, exchanges
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.exchange import Compressed, Dense, Gradients, Link, Machine, TopK, kinds, predict
from jaxdl.exchange.auto import recommend
from jaxdl.exchange.cost import Cost
from jaxdl.parallel.mesh import Axis

GRADIENTS = Gradients({"kernel": (1000, 1000), "bias": (1000,)}, 8)
MACHINE = Machine({Axis.REPLICA.value: Link(1e-5, 1e8)})


with forgotten():  # No list of kinds in this process has them.

    class Incomplete(Compressed):
        """It knows everything but its cost."""

        @property
        def label(self):
            return "halves"

        @property
        def distortion(self):
            return 1, 0

        def send(self, message, context):
            return TopK().send(message, context)

    class Halves(Incomplete):
        def bucket_cost(self, bucket, gradients, machine):
            num_bytes = 2.0 * bucket.num_own
            latency, wire = machine.slow.seconds(gradients.num_replicas - 1, num_bytes)
            return Cost(latency_sec=latency, wire_sec=wire, sent_bytes=num_bytes)


def test_an_own_kind_is_predicted_and_recommended():
    cost = predict(Halves(), GRADIENTS, MACHINE)
    dense_bytes = 2 * 7 / 8 * 4 * 1000  # The bias is too small to be compressed.
    assert cost.sent_bytes == 2.0 * 1_000_000 + dense_bytes
    assert cost.wire_sec == pytest.approx(cost.sent_bytes / 1e8)
    found = recommend([Dense(), TopK(density=0.5), Halves()], GRADIENTS, MACHINE)
    assert found.best == Halves()
    assert any(line.startswith("halves sends") for line in found.reasons)
    # Rougher ones are not taken for a little more speed, gentler ones are.
    assert recommend([Dense(), TopK(density=0.061), Halves()], GRADIENTS, MACHINE).best == Halves()


def test_a_kind_that_forgets_its_cost_cannot_be_used():
    with pytest.raises(ConfigError, match=r"Incomplete does not define bucket_cost\(\), which every exchange needs"):
        Incomplete()


def test_an_exchange_that_costs_nothing_is_no_division_by_zero():
    free = Machine({Axis.REPLICA.value: Link(0.0, float("inf"))})
    assert recommend([Dense(), Halves()], GRADIENTS, free).best == Dense()


OWN_KIND = """
from jaxdl.performance.bench.cluster.cluster_variants import VARIANTS
from jaxdl.performance.bench.exchange import exchanges, parse_command
from jaxdl.exchange import Auto, TopK, kinds

before = len(exchanges(parse_command([])))

class Half(TopK):
    @classmethod
    def variants(cls):
        return [cls(), cls(density=0.5)]

    @classmethod
    def candidates(cls, densities, num_replicas):
        return {"half": [cls(density=0.5)]}

assert kinds()["half"] is Half
assert len(exchanges(parse_command([]))) == before + 2
assert Half(density=0.5) in Auto(candidates=("half",)).configs(2)
"""


@pytest.mark.slow
def test_the_lists_of_kinds_have_an_own_kind():
    """In a process of its own: a class stays in the lists of its process for as long as it lives."""
    subprocess.run([sys.executable, "-c", OWN_KIND], check=True, cwd=Path(__file__).parent.parent)


def test_a_schedule_is_compared_with_one_of_each_other_kind():
    experiment = tiny_experiment(exchange=TopK(density=0.5, delay_steps=1))
    found = exchanges(ScheduleBench(Path("x.py"), experiment, all_exchanges=True))
    assert {one.kind for one in found} == set(kinds()) == {"dense", "topk", "quantized", "powersgd", "sign", "demo"}
    assert len(found) == 6
    assert found[0] == experiment.exchange
    assert all(one.delay_steps == 1 for one in found)
