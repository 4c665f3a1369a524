"""The options of `python -m jaxdl.serve`; `jaxdl.inference.serve.__main__` checks the workdir before."""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxdl.core.config import ConfigError
from jaxdl.core.web.listening import (
    address_of,
    bind,
    is_local,
    kept_signals,
    local_names,
    others_read,
    read_tokens,
)
from jaxdl.data.text.chat_template import PLAIN_ORIGIN
from jaxdl.inference.chatting import Chat
from jaxdl.inference.predictor import Predictor
from jaxdl.inference.serve.engine import Engine
from jaxdl.inference.serve.programs import Programs
from jaxdl.inference.serve.requests import Served
from jaxdl.inference.trained import RunCommand, check_positive, parse_command, restore_network
from jaxdl.parallel.cluster import end_together, host_memory_bytes
from jaxdl.training.run.result import exit_codes

ABOUT = """Answers the requests of OpenAI's clients with a trained language model: /v1/completions,
/v1/chat/completions, /v1/models, /health and /metrics.

  python -m jaxdl.serve --workdir runs/python_lm
  JAXDL_SERVE_TOKEN=... python -m jaxdl.serve --workdir runs/tuned --host 0.0.0.0 --slots 16"""

TOKEN_VARIABLE = "JAXDL_SERVE_TOKEN"
"""The environment variable that may have the token."""
_BACKLOG = 2048
"""Connections that wait until they are taken."""


@dataclass(frozen=True, kw_only=True)
class Serve(RunCommand):
    """The options of the command."""

    host: str = "127.0.0.1"
    """The name or address to listen on; the default is reached from this machine alone. Others need a token, or
    --without-token."""
    port: int = 8000
    """The port; 0 takes one that is free, and the first line that is printed says which."""
    token_file: Path | None = None
    """A file of tokens, one on each line: a client must send one of them. The variable JAXDL_SERVE_TOKEN may have one
    too."""
    without_token: bool = False
    """Let everyone who reaches a --host that is not of this machine alone use it."""
    name: str | None = None
    """The name of the model for clients; None takes that of the workdir's folder."""
    slots: int = 8
    """Texts that are written side by side. Each has a part of the key-value cache."""
    context: int | None = None
    """The most tokens of a prompt and its continuation; None takes what the network reads at a time."""
    max_tokens: int | None = None
    """The most tokens that one request may ask for; None allows what is left of the context."""
    queue: int = 64
    """Texts that may wait for a slot. Further requests are answered with 429."""
    max_requests: int = 128
    """Requests that are answered at once; further ones get 429."""
    max_body_bytes: int = 4_000_000
    """The largest body of a request; larger ones get 413."""
    timeout_sec: float = 600.0
    """How long a request may take; then it gets 503, and its slot is free."""
    drain_sec: float = 60.0
    """After SIGTERM or Ctrl-C no requests are taken, and those that are being answered have so long to end."""
    exact: bool = False
    """Compute in the same shapes whatever the load, so that a text depends on its request alone, bit for bit. Without
    it a text may, by the rounding of sums, depend on how many are written beside it; a lone request is faster."""
    warm_up: bool = True
    """Compile all programs before the first request, not when they are first needed."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. Exits as `exit_codes` says, with 1 after an error of the device."""
    with end_together(), exit_codes():
        command = parse_command(Serve, args, prog, ABOUT)
        check(command)
        check_extra()
        tokens = read_tokens(command.token_file, TOKEN_VARIABLE)
        with bind(command.host, command.port) as bound:
            check_reach(command, bound, tokens)
            predictor = restore_network(command, args)
            if jax.process_count() > 1:
                raise ConfigError("serve: it runs in one process. Use the devices of one machine.")
            server, engine = make_server(command, predictor, bound, tokens)
            engine.start()
            bound.listen(_BACKLOG)  # Who reads the next line may connect at once.
            print("clients need a token" if tokens else "clients need no token", file=sys.stderr)
            print(
                f"serving {model_name(command, predictor)} (step {predictor.step}) on {address_of(bound)}/v1",
                flush=True,
            )
            try:
                with kept_signals():
                    asyncio.run(server.serve(sockets=[bound]))
            finally:
                engine.stop()
        if engine.failure is not None:
            raise SystemExit(1)


def check(command: Serve) -> None:
    """Raises ConfigError for options that are out of range."""
    check_positive(command, "slots", "context", "max_tokens", "max_requests", "max_body_bytes")
    if command.queue < 0:
        raise ConfigError(f"--queue {command.queue}: give a whole number, 0 or more.")
    for name in ("timeout_sec", "drain_sec"):
        if not 0 < (value := getattr(command, name)) < 1e9:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number of seconds above 0.")
    if command.name is not None and not command.name.strip():
        raise ConfigError("--name '': empty. Give a name, or leave it out.")


def check_extra() -> None:
    """Raises ConfigError when a package of the extra `serve` is missing."""
    for package in ("starlette", "uvicorn"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise ConfigError(
                f"serve: it needs the package {package}, which is not installed. Install it with pip install "
                "'jaxdl[serve]'."
            ) from None


def check_reach(command: Serve, bound: socket.socket, tokens: tuple[str, ...]) -> None:
    """Raises ConfigError for a server that others reach without a token, unless that is asked for."""
    if tokens and command.without_token:
        raise ConfigError("--without-token: there is a token too. Leave one out.")
    if not tokens and not is_local(bound) and not command.without_token:
        raise ConfigError(
            f"--host {command.host}: other machines reach it, and no token protects it. Set {TOKEN_VARIABLE}, or give "
            "--token-file FILE; --without-token lets everyone use it."
        )
    if command.token_file is not None and others_read(command.token_file):
        print(f"warning: --token-file {command.token_file}: other users may read it (chmod 600)", file=sys.stderr)


def make_programs(command: Serve, predictor: Predictor) -> Programs:
    """The programs of the server. Raises ConfigError for a network of no text, and for a cache that has no room."""
    spec = predictor.check_text("serve")
    most = predictor.experiment.model.context(spec.length)
    context = command.context or most or spec.length
    if most is not None and context > most:
        raise ConfigError(f"--context {context}: the network reads {most} tokens at a time. Give at most so many.")
    merged = predictor.merged()
    programs = Programs(
        merged,
        num_slots=command.slots,
        context=context,
        vocab_size=predictor.codec.vocab_size,
        exact=command.exact,
        same_rows=merged.experiment.model.users_name is not None,
    )
    _check_room(command, programs)
    return programs


def _check_room(command: Serve, programs: Programs) -> None:
    """Says how large the cache is. Raises ConfigError when there is no room for it."""
    devices = programs.devices
    one = programs.cache_bytes / len(devices)
    stats = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    there = float(host_memory_bytes())
    if devices[0].platform == "cpu":
        one *= len(devices)  # They share the memory of the host.
    elif stats and "bytes_limit" in stats:
        there = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    else:
        there = float("inf")
    each = programs.cache_bytes / programs.num_slots
    size = f"{programs.num_slots} slots of {programs.context:,} tokens take {_size(programs.cache_bytes)}"
    if one > there:
        raise ConfigError(
            f"--slots {command.slots}: the key-value cache of {size}, and {_size(there)} are there. Give fewer, or a "
            "shorter --context."
        )
    print(f"key-value cache: {size}, {_size(each)} each", file=sys.stderr)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"


def model_name(command: Serve, predictor: Predictor) -> str:
    """By which clients ask for the model."""
    return command.name or predictor.workdir.resolve().name


def make_served(command: Serve, predictor: Predictor, programs: Programs) -> Served:
    """What clients are told of the network, and how their texts are read."""
    try:
        chat = Chat(predictor)
    except ConfigError as error:
        print(f"note: no /v1/chat/completions: {error}", file=sys.stderr)
        chat = None
    if chat is not None and chat.template.origin == PLAIN_ORIGIN:
        print(f"note: the run has no chat template; {PLAIN_ORIGIN} is used", file=sys.stderr)
    return Served(
        name=model_name(command, predictor),
        step=predictor.step,
        codec=predictor.codec,
        context=programs.context,
        max_tokens=min(command.max_tokens or programs.context, programs.context),
        most_texts=programs.num_slots + command.queue,
        chat=chat,
    )


def make_server(
    command: Serve, predictor: Predictor, bound: socket.socket, tokens: tuple[str, ...] = ()
) -> tuple[Any, Engine]:
    """`(server, engine)`: a `uvicorn.Server` for a socket, and what writes its texts; neither has started.

    The server ends when the engine fails. Raises ConfigError as `make_programs` does.
    """
    from jaxdl.core.web.connections import make_server as make_web_server
    from jaxdl.inference.serve.app import Limits, make_app

    programs = make_programs(command, predictor)
    served = make_served(command, predictor, programs)
    programs.allocate()
    if command.warm_up:
        start, count = time.perf_counter(), programs.warm_up()
        print(f"{count} programs are ready after {time.perf_counter() - start:.1f} s", file=sys.stderr)
    engine = Engine(programs, max_waiting=command.queue)
    limits = Limits(command.max_requests, command.max_body_bytes, command.timeout_sec)
    hosts = None if tokens or not is_local(bound) else local_names(command.host)
    server = make_web_server(
        make_app(served, engine, limits, tokens=tokens, hosts=hosts),
        most_connections=8 * command.max_requests + 100,
        backlog=_BACKLOG,
        drain_sec=int(max(1, command.drain_sec)),
    )
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # Requests that are no HTTP; errors are printed here.
    engine.failed = lambda: setattr(server, "should_exit", True)
    return server, engine
