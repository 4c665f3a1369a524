"""A process that tokenizes: `python -m jaxdl.data.text.shard_worker`. Started only by `jaxdl.data.text.tokenizing`.

It reads the plan, then numbers of pieces, and answers each with what is in its shard. It exits when its parent does,
because its input ends. It never imports JAX.
"""

from __future__ import annotations

import json
import pickle
import signal
import sys

from jaxdl.core.config import ConfigError
from jaxdl.data.text.shards import ShardPlan, write_shard


def main() -> None:
    """Writes shards until the input ends."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # They reach the group; the parent ends this process.
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # A parent that was killed takes no answer: end without a traceback.
    plan = pickle.load(sys.stdin.buffer)
    assert isinstance(plan, ShardPlan)
    for line in sys.stdin.buffer:
        try:
            answer = write_shard(plan, int(line))._asdict()
        except ConfigError as error:
            answer = {"error": str(error)}
        except OSError as error:
            where = error.filename or plan.folder
            answer = {"error": f"{where}: {error.strerror}. The shards of tokens are written there."}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
