"""What `python -m jaxdl.bench balance` computes: networks, their operations by formula, and regimes of batches.

A regime is a network and the examples of one device. Operations for each byte of gradient decide whether a step waits
for its network or for its devices: BSMBench (Bennett et al., arXiv 1401.3733) varies that ratio between its regimes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxdl.data import SyntheticText
from jaxdl.exchange import Dense, ExchangeConfig
from jaxdl.exchange.agreement import EveryStep, Periodic
from jaxdl.models import Transformer, preset
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.cluster import ClusterConfig
from jaxdl.parallel.mesh import Device, MeshConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import Plan, make_plan
from jaxdl.training.tasks import LanguageModelling

Size = Literal["tiny", "small", "large"]
RELATIVE = {"0.5x": 0.5, "1x": 1.0, "2x": 2.0}
"""Regimes of the block: operations for each byte of gradient, relative to the balance point of the machine."""
REGIMES = (*RELATIVE, "comms", "compute")
"""All regimes. Those that are not relative are the same on every machine."""
PATIENCE_SEC = 600.0
"""Processes may share cores, and wait while others compile; they must not be taken for lost."""
_PROBE_EXAMPLES = 8
_MOST_PROBES = 8
_NEAR = 0.1
"""So much may the texts at the balance point change by one more probe."""
_PASSES = 3
"""A step is a forward pass and a backward pass of twice its products."""


@dataclass(frozen=True)
class Work:
    """A transformer, the texts that it reads, and how many of them."""

    model: Transformer
    length: int
    """Tokens of a text."""
    vocab_size: int = 256
    examples: int = 1
    """Texts of one device in a step."""

    def flops(self, examples: int = 1) -> float:
        """Operations of the products in a training step on so many texts, in closed form.

        A multiplication and an addition are two operations; products that a causal mask removes count, and whatever an
        implementation computes again does not. So the figures of two implementations can be compared.
        """
        model = self.model
        heads, kv_width = model.num_heads * model.head_dim, model.kv_heads * model.head_dim
        width = model.embed_dim
        projections = 2 * width * (2 * heads + 2 * kv_width)
        scores = 2 * 2 * self.length * heads
        mlp = 2 * (3 if model.mlp in ("swiglu", "geglu") else 2) * width * model.hidden_dim
        logits = 2 * width * self.vocab_size
        per_token = model.num_layers * (projections + scores + mlp) + logits
        return float(_PASSES * per_token * self.length * examples)


# Texts of the blocks for CPUs are short: virtual devices share their memory, so that their balance point is low, and a
# text is the least by which a batch can change.
_WORKS: dict[Size, dict[str, Work]] = {
    "tiny": {
        "block": Work(Transformer(embed_dim=64, num_heads=2, num_layers=1), length=2, vocab_size=32),
        "comms": Work(Transformer(embed_dim=96, num_heads=2, num_layers=1), length=8, vocab_size=32),
        "compute": Work(Transformer(embed_dim=32, num_heads=2, num_layers=1), length=8, vocab_size=32, examples=16),
    },
    "small": {
        "block": Work(Transformer(embed_dim=256, num_heads=4, num_layers=1), length=2),
        "comms": Work(Transformer(embed_dim=512, num_heads=8, num_layers=1), length=16),
        "compute": Work(Transformer(embed_dim=128, num_heads=2, num_layers=1), length=16, examples=64),
    },
    "large": {
        "block": Work(Transformer(embed_dim=1024, num_heads=16, num_layers=1), length=128),
        "comms": Work(preset("gpt2-124m", dropout=0.0, attention_dropout=0.0), 1024, 50_257),
        "compute": Work(preset("gpt2-124m", dropout=0.0, attention_dropout=0.0), 1024, 50_257, examples=8),
    },
}


def block(size: Size) -> Work:
    """The block of the relative regimes, with one text a device."""
    return _WORKS[size]["block"]


def work_of(regime: str, size: Size) -> Work:
    """The network of a regime; of a relative one with one text a device, until `with_intensity` knows better."""
    return _WORKS[size]["block" if regime in RELATIVE else regime]


def with_intensity(work: Work, wanted: float, gradient_bytes: float, most: int) -> Work:
    """The work with the number of texts that has about `wanted` operations for each byte of gradient of a device.

    At least one text, and `most` at most.
    """
    examples = round(wanted * gradient_bytes / work.flops())
    return dataclasses.replace(work, examples=min(max(1, examples), most))


def balanced_rate(
    work: Work, seconds_of: Callable[[Work], float], *, exchange_sec: float, gradient_bytes: float, most: int
) -> float:
    """Operations a second of a device in a local step that takes about as long as an exchange.

    `seconds_of` returns the seconds of a local step of a work. A device computes more in a second on a larger batch, so
    it is probed with 8 texts, then with as many as fill `exchange_sec` at that rate, until their number stays, 8 times
    at most. Where a step on n texts takes a + b n, each probe leaves a / exchange_sec of the distance.
    """
    work, rate = dataclasses.replace(work, examples=min(_PROBE_EXAMPLES, most)), 0.0
    for _ in range(_MOST_PROBES):
        rate = work.flops(work.examples) / seconds_of(work)
        better = with_intensity(work, rate * exchange_sec / gradient_bytes, gradient_bytes, most)
        if abs(better.examples - work.examples) <= _NEAR * work.examples:
            break
        work = better
    return rate


def make_work_plan(
    work: Work,
    exchange: ExchangeConfig | None,
    *,
    replicas: int,
    inner: int,
    precision: str,
    devices: list[Device],
) -> Plan:
    """The run of a work on these devices, `inner` of them a replica; with None for exchange, its local step.

    All processes call it alike, also those that have none of the devices. Raises ConfigError for an exchange that does
    not fit.
    """
    batch_size = work.examples * replicas * inner
    agreement: Any = Periodic() if exchange is None and replicas > 1 else EveryStep()
    experiment = Experiment(
        model=work.model,
        task=LanguageModelling(),
        data=SyntheticText(vocab_size=work.vocab_size, length=work.length, num_train=4 * batch_size),
        optimizer=SGD(learning_rate=0.1, momentum=0.9),
        schedule=Constant(),
        batch_size=batch_size,
        steps=1_000_000,
        mesh=MeshConfig(replica=replicas, fsdp=inner),
        exchange=exchange or Dense(),
        agreement=agreement,
        cluster=ClusterConfig(start_timeout_sec=PATIENCE_SEC, silence_timeout_sec=PATIENCE_SEC),
    ).replaced({"precision": precision})
    return make_plan(experiment, devices)
