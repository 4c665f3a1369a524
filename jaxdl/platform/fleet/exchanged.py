"""What the gradient exchange of a submitted run takes on each of its sizes, over the network of the fleet.

The shapes of the gradients follow from the config, the specification of its data and the rules of sharding: the model
is traced, nothing is compiled, and JAX starts no devices. Times are those of `jaxdl.exchange.cost`, with orders of
magnitude for all but the network.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.startup import training_options
from jaxdl.platform.fleet.sizes import ReadConfig, UnreadError, devices_of_host, reader, trains
from jaxdl.platform.fleet.speed import Exchange
from jaxdl.platform.fleet.submission import words_on
from jaxdl.platform.launch.netns import parse_rate

_LATENCY_SEC = 20e-6
"""Of a message to another node, an order of magnitude."""


def exchange_of(
    command: Sequence[str], sizes: Sequence[int], gpus: Sequence[int], network: str, read: ReadConfig | None = None
) -> tuple[Exchange | None, str]:
    """(The exchange of a run on these sizes, why it is not known of all of them).

    Hosts have one of these numbers of GPUs; where several are possible the slowest exchange counts. Of a command that
    is no training it is None, without a reason. Raises ConfigError for a network that is no rate.
    """
    parse_rate(network)
    if not trains(command):
        return None, ""
    read, specs, seconds, batches, why = read or reader(), _Specs(), dict[int, float](), set[int](), ""
    for size in sizes:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # What a config file prints.
                args = tuple(training_options(words_on(command, size)) or ())
                experiment, seconds[size] = _slowest(read, specs, args, size, gpus, network)
                batches.add(experiment.batch_size)
        except (UnreadError, ConfigError, ValueError) as error:
            why = why or " ".join(str(error).split())
    if len(batches) > 1:
        return None, "its batch size depends on the number of nodes"
    return (Exchange(network, batches.pop(), seconds) if seconds else None), why


class _Specs:
    """The specifications of data: those of one config are read once."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, Any]] = []

    def of(self, experiment: Any) -> Any:
        """That of an experiment's data, or of made-up ones of the same shapes. Raises ConfigError as reading does."""
        from jaxdl.training.run.plan.data import read_splits

        data = experiment.data.stand_in(getattr(experiment.model, "vocab_size", None)) or experiment.data
        for known, spec in self._known:
            if known == data:
                return spec
        spec = read_splits(data, None).train.spec
        self._known.append((data, spec))
        return spec


def _slowest(
    read: ReadConfig, specs: _Specs, args: tuple[str, ...], size: int, gpus: Sequence[int], network: str
) -> tuple[Any, float]:
    """(The experiment, seconds of an exchange on so many hosts). Raises ConfigError where that is not known."""
    candidates: list[tuple[Any, float]] = []
    refused: ConfigError | None = None
    for num_gpus in gpus:
        experiment = read(args, num_gpus > 0)[0]
        each = devices_of_host(experiment, num_gpus)
        try:
            mesh = experiment.mesh.sizes(size * each)
        except ConfigError as error:  # No such host can have the run.
            refused = error
            continue
        _check(experiment)
        seconds = exchange_seconds(
            experiment, specs.of(experiment), mesh, size, each, on_gpus=num_gpus > 0, network=network
        )
        candidates.append((experiment, seconds))
    if not candidates:
        assert refused is not None, gpus
        raise refused
    return max(candidates, key=lambda candidate: candidate[1])


def _check(experiment: Any) -> None:
    """Raises ConfigError where a step on n nodes is not known from one on others."""
    if experiment.plan.planner:
        raise ConfigError("its mesh is planned when it runs")
    if any(phase.batch_size not in (None, experiment.batch_size) for phase in experiment.phases):
        raise ConfigError("its phases have other batch sizes")


def exchange_seconds(
    experiment: Any, spec: Any, mesh: Mapping[str, int], num_hosts: int, each: int, *, on_gpus: bool, network: str
) -> float:
    """Seconds that the exchange of an experiment adds to an average step, for data that `spec` describes.

    The mesh has these sizes; of `num_hosts` hosts each has `each` devices, which share its network, of a rate such as
    25gbit. On one host it goes over the links inside. Nothing is taken to hide it. Raises ConfigError where the model
    does not tell: tables, and replicas over several hosts, send more than the exchange.
    """
    from jax.sharding import AbstractMesh

    from jaxdl.exchange import Auto, ExchangeConfig
    from jaxdl.exchange.auto import INNER_LINKS, recommend
    from jaxdl.exchange.cost import NOMINAL_SPEEDS, Link, Machine
    from jaxdl.parallel.mesh import Axis
    from jaxdl.training.run.plan.exchange import exchanged_gradients

    if not spec.fits(experiment.model.modality):
        raise ConfigError("its model does not read its data")
    if experiment.model.tables(spec.id_features()):
        raise ConfigError("its embedding tables send messages of their own")
    replicas = mesh[Axis.REPLICA.value]
    if num_hosts > 1 and num_hosts * each // replicas > each:
        raise ConfigError("a replica is on several nodes")
    if replicas == 1:
        return 0.0
    kind = "gpu" if on_gpus else "cpu"
    links = dict.fromkeys((axis.value for axis in Axis), INNER_LINKS[kind])
    if num_hosts > 1:
        links[Axis.REPLICA.value] = Link(_LATENCY_SEC, parse_rate(network) / 8 / each)
    machine = Machine(links, NOMINAL_SPEEDS[kind])
    described: Any = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    gradients, agreement = exchanged_gradients(experiment, spec, described), experiment.agreement
    exchange = experiment.exchange
    if isinstance(exchange, Auto):  # It will choose by the network that it measures.
        choice = recommend(exchange.configs(replicas), gradients, machine, agreement=agreement)
        return next(cost for config, cost in choice.rows if config == choice.best).total_sec
    if not isinstance(exchange, ExchangeConfig):
        raise ConfigError(f"what exchange {exchange.kind} takes is not known")
    return agreement.cost(exchange, gradients, machine).total_sec
