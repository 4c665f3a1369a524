"""Runs of replicas with local steps in one of several processes: `python -m tests.agreeing_train LIMIT --config ...`.

One run, WORKDIR/whole, ends by a hook: after the first step whose training loss, if it is known of all replicas, is
below LIMIT. Another, WORKDIR/parts, is stopped within a round and gone on with. What hooks have seen is written to
WORKDIR/seenN.json, N the number of the process.
"""

import json
import sys

import jax
import numpy as np

import jaxdl
from jaxdl.parallel.cluster import end_together
from jaxdl.training.command import parse_command
from jaxdl.training.run.compile import shared_programs
from jaxdl.training.run.hooks import StepInfo
from jaxdl.training.run.result import exit_codes

STOPPED_AT = 6
"""Within a round of four steps."""


def shards(state) -> list[bytes]:
    """All bits of a state that this process has."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    return [np.asarray(one.data).tobytes() for x in arrays for one in x.addressable_shards]


def main() -> None:
    limit = float(sys.argv[1])
    with end_together(), exit_codes(), shared_programs():
        command = parse_command(sys.argv[2:])
        seen = []

        def hook(info: StepInfo) -> None:
            seen.append(info.metrics())
            if seen[-1].get("loss", limit) < limit:
                info.stop()

        whole, parts = (f"{command.workdir}/{name}" for name in ("whole", "parts"))
        ended = jaxdl.train(command.experiment, whole, on_step=hook)
        jaxdl.train(command.experiment, parts, quiet=True, max_steps=STOPPED_AT)
        again = jaxdl.train(command.experiment, parts, quiet=True, max_steps=ended.summary["steps"])
        found = {"same": shards(ended.state) == shards(again.state), "end": ended.summary["steps"]}
        with open(f"{command.workdir}/seen{jax.process_index()}.json", "w") as file:
            json.dump({"steps": seen, "history": ended.history, **found}, file)


if __name__ == "__main__":
    main()
