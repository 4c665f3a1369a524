"""The command line of the measurements."""

from __future__ import annotations

import sys
from collections.abc import Callable

from jaxdl.core.errors import command_line, fail
from jaxdl.performance.bench import (
    exchange,
    generate,
    input,
    memory,
    optim,
    schedule,
    scheme,
    select,
    startup,
    step,
    tokenize,
    traffic,
    train,
)
from jaxdl.performance.bench.balance import balance
from jaxdl.performance.bench.cluster import cluster
from jaxdl.performance.bench.embedding import cache, embedding, placement, rows
from jaxdl.performance.bench.planner import planner

BENCHES: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    "step": ("the training loop's time per step over that of the bare jitted step", step.main),
    "train": (
        "the training speed of a config: images or tokens a second, share of the peak, against PyTorch",
        train.main,
    ),
    "memory": ("the memory of a device and the least time of a step by mesh and remat, compiled for H100", memory.main),
    "optim": ("the optimizer update split over the devices, against the whole update on each", optim.main),
    "placement": ("embedding shards on devices with little memory to spare, beside simpler ways", placement.main),
    "planner": ("the planner's memory and step times, beside XLA's memory and timed runs", planner.main),
    "traffic": ("the bytes that every exchange sends, counted in its program", traffic.main),
    "scheme": ("the collectives of the compiled training step, also compiled for 8 x H100", scheme.main),
    "cluster": ("every gradient exchange in the train step, on an emulated cluster with a slow network", cluster.main),
    "balance": ("all-reduces of one number, local steps and whole steps, at several ratios of compute", balance.main),
    "schedule": ("the share of every exchange that the compiled training step overlaps with compute", schedule.main),
    "exchange": ("every gradient exchange: predicted by the cost model, and measured", exchange.main),
    "input": ("the image pipeline, cold and cached, against tf.data, PyTorch's DataLoader and Grain", input.main),
    "startup": ("CPU seconds until the first output of a command, and until the error of a wrong one", startup.main),
    "cache": ("look-ahead caches of embedding tables beside whole ones: hits, step times, bits", cache.main),
    "embedding": ("embedding tables under every scheme and the plan: bytes between nodes, step times", embedding.main),
    "rows": ("rows a second of lookups and exact updates of tables on one device, against PyTorch", rows.main),
    "generate": ("tokens a second that a language model writes, with and without its key-value cache", generate.main),
    "tokenize": ("preparing text for training, beside the tokenizers library alone: MB/s", tokenize.main),
    "select": ("methods of select_top_k against lax.top_k and one read of the data", select.main),
}


def main(args: list[str]) -> None:
    """Runs one measurement; exits with 2 for user errors, 130 after Ctrl-C."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m jaxdl.bench NAME [OPTIONS]\n")
        for name, (what, _) in BENCHES.items():
            print(f"  {name:10} {what}")
        raise SystemExit(0)
    if args[0] not in BENCHES:
        fail(f"{args[0]}: there is no such measurement; choose one of {', '.join(BENCHES)}.")
    with command_line():
        BENCHES[args[0]][1](args[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
