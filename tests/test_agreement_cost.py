"""What an agreement adds to an average step, by the cost model, and the exchange that is chosen for it."""

import jax
import pytest
from runs import tiny_experiment

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Auto, Dense, GradientLayout, Quantized, TopK
from jaxdl.exchange.agreement import Asynchronous, Elastic, EveryStep, Gossip, Periodic
from jaxdl.exchange.auto import recommend
from jaxdl.exchange.cost import Cost, Gradients, Link, Machine, Speeds, predict
from jaxdl.parallel.mesh import Axis, MeshConfig
from jaxdl.training.run.plan.build import make_plan

REPLICA = Axis.REPLICA.value
LAYERS = 8
FOUR = Gradients({"layers/kernel": (LAYERS, 100, 100)}, 4, GradientLayout(stacked=frozenset({"layers/kernel"})))
LATENCY, RATE = 1e-3, 1e6
NETWORK = Machine({REPLICA: Link(LATENCY, RATE)})
# A ring of 4: 6 messages, 3/2 of the bytes.
ALL_REDUCE_SEC = 6 * LATENCY + 1.5 * 4 * FOUR.num_elements / RATE


def test_replicas_that_agree_in_every_step_pay_for_the_exchange():
    for exchange in (Dense(), Quantized(bits=4), TopK()):
        assert EveryStep().cost(exchange, FOUR, NETWORK) == predict(exchange, FOUR, NETWORK)
    assert EveryStep().traffic(Dense(), FOUR) == (480_000, 480_000)


@pytest.mark.parametrize("agreement", [Periodic(every_steps=32), Elastic(every_steps=32), Periodic(start_step=5)])
def test_a_merge_is_divided_among_the_steps_between_two(agreement):
    cost = agreement.cost(Dense(), FOUR, NETWORK)
    assert cost.total_sec == pytest.approx(ALL_REDUCE_SEC / 32)
    assert agreement.traffic(Dense(), FOUR) == (480_000 / 32, 480_000)
    # Nothing travels beside local steps, however long they are.
    assert agreement.cost(Dense(), FOUR, NETWORK, step_sec=10.0) == cost


def test_each_fragment_is_a_message_of_its_own():
    agreement = Periodic(every_steps=32, fragments=4)
    cost = agreement.cost(Dense(), FOUR, NETWORK)
    assert cost.latency_sec == pytest.approx(4 * 6 * LATENCY / 32)
    assert cost.wire_sec == pytest.approx(480_000 / RATE / 32)
    assert agreement.traffic(Dense(), FOUR) == pytest.approx((480_000 / 32, 480_000 / 4))
    # More fragments than there are parts: the empty ones send nothing.
    few = Gradients({"a": (10,), "b": (10,)}, 4)
    assert Periodic(fragments=3).cost(Dense(), few, NETWORK).latency_sec == pytest.approx(2 * 6 * LATENCY / 32)


def test_steps_beside_a_merge_hide_its_messages():
    """Not the work of the exchange, not more than there is, and only where messages travel during computation."""
    streaming = Periodic(every_steps=32, fragments=4, overlap_steps=2)
    overlaps = Machine(NETWORK.links, overlaps=True)
    one = ALL_REDUCE_SEC / 4 + 0.75 * 6 * LATENCY
    for step_sec, left in ((0.0, one), (0.01, one - 0.02), (0.05, one - 0.1), (0.5, 0.0)):
        cost = streaming.cost(Dense(), FOUR, overlaps, step_sec)
        assert cost.total_sec == pytest.approx(4 * left / 32)
        assert cost.sent_bytes == pytest.approx(480_000 / 32)
        assert streaming.cost(Dense(), FOUR, NETWORK, step_sec).total_sec == pytest.approx(4 * one / 32)
    slow = Machine(NETWORK.links, Speeds(memory_bytes_per_sec=1e6), overlaps=True)
    found = streaming.cost(Dense(), FOUR, slow, 100.0)
    assert found.total_sec == found.compute_sec > 0


@pytest.mark.parametrize(("num_replicas", "ring", "exponential"), [(2, 1, 1), (4, 2, 2), (8, 2, 3)])
def test_gossip_sends_whole_parameters_to_neighbours(num_replicas, ring, exponential):
    gradients = Gradients({"kernel": (99, 101)}, num_replicas)
    message = 4 * (99 * 101 + 1)  # And a weight.
    for graph, count in (("ring", ring), ("exponential", exponential), ("one_peer_exponential", 1)):
        agreement = Gossip(graph=graph)
        cost = agreement.cost(Dense(), gradients, NETWORK)
        assert cost.total_sec == pytest.approx(count * (LATENCY + message / RATE))
        assert agreement.traffic(Dense(), gradients) == pytest.approx((count * message, count * message))
        seldom = Gossip(graph=graph, every_steps=5)
        assert seldom.cost(Dense(), gradients, NETWORK).total_sec == pytest.approx(cost.total_sec / 5)
    # A machine on which single messages were measured.
    permutes = Machine({REPLICA: Link(1.0, 1.0, {"permute": Link(LATENCY, RATE)})})
    assert Gossip().cost(Dense(), gradients, permutes).total_sec == pytest.approx(LATENCY + message / RATE)


def test_who_waits_for_nobody_and_who_is_alone():
    alone = Gradients(FOUR.shapes, 1)
    for agreement in (Asynchronous(), EveryStep(), Periodic(), Elastic(), Gossip()):
        assert agreement.cost(Dense(), alone, NETWORK) == Cost()
        assert agreement.traffic(Dense(), alone) == (0, 0)
    assert Asynchronous().cost(Dense(), FOUR, NETWORK) == Cost()


CANDIDATES = (Dense(), Quantized(bits=8), TopK())


def chosen(agreement, step_sec=0.0, **options):
    found = recommend(CANDIDATES, FOUR, NETWORK, agreement=agreement, step_sec=step_sec, **options)
    return found.best, "\n".join(found.reasons)


def test_a_merge_that_adds_little_to_a_step_is_not_compressed():
    """Dense takes 0.486 s: of a step of 0.1 s much, but once in 256 steps 1.9 %."""
    assert chosen(EveryStep(), 0.1)[0] == TopK()
    best, why = chosen(Periodic(every_steps=256), 0.1)
    assert best == Dense()
    assert "agreement periodic 256, average: bytes and times are those of an average step" in why
    assert "dense float32, the fastest dense exchange, sends 0.00187 MB and takes 1.9 ms, beside 100 ms of the" in why
    assert "a step is 1.02x as fast; less than 1.2x is not worth a changed gradient" in why
    assert chosen(Periodic(every_steps=256), 0.1, min_speedup=1.005)[0] == Quantized(bits=8)
    assert chosen(Elastic(every_steps=4), 0.2)[0] == Quantized(bits=8)
    assert chosen(Periodic(every_steps=8), 1e-3)[0] == TopK()


def test_without_the_time_of_a_step_exchanges_are_compared():
    best, why = chosen(Periodic(every_steps=256))
    assert best == TopK()
    limit = float(why.partition("(--exchange.step-ms): above ")[2].partition(" ms")[0])
    for factor, expected in ((1.01, Dense()), (0.99, None)):
        found = chosen(Periodic(every_steps=256), factor * limit * 1e-3)[0]
        assert (found == Dense()) == (expected == Dense()), factor
    assert "step-ms" not in chosen(Periodic(every_steps=256), min_speedup=1)[1]
    assert "step-ms" not in chosen(EveryStep())[1]


def test_an_exchange_that_takes_longer_than_the_step_points_to_agreements():
    dense = recommend((Dense(),), FOUR, NETWORK, agreement=EveryStep(), step_sec=0.1)
    assert "longer than the rest of a step (100 ms): --agreement diloco" in dense.reasons[-1]
    assert not any("diloco" in line for line in recommend((Dense(),), FOUR, NETWORK, step_sec=1.0).reasons)


def test_auto_chooses_for_the_agreement_of_the_run():
    network = {"bandwidth_gbps": 1e-3, "latency_us": 100.0, "candidates": ("quantized",)}
    run = tiny_experiment(mesh=MeshConfig(replica=4, fsdp=2), step={}, exchange=Auto(**network))
    local = run.replaced({"agreement": Periodic(every_steps=1000), "steps": 2000, "epochs": None})
    assert isinstance(make_plan(local, jax.devices()).exchange, Quantized)
    known = make_plan(local.replaced({"exchange.step_ms": 50.0}), jax.devices())
    assert known.exchange == Dense()
    assert any("periodic 1000" in line for line in known.reasons)
    for agreement, exchange, message in (
        (Gossip(), {}, "exchange auto: with .*gossip replicas send each other whole parameters"),
        (Elastic(), {"delay_steps": 1}, "delay_steps=1: with .*elastic a merge would be applied"),
    ):
        wrong = run.replaced({"agreement": agreement, "exchange": Auto(**(network | exchange))})
        with pytest.raises(ConfigError, match=message):
            make_plan(wrong, jax.devices())
