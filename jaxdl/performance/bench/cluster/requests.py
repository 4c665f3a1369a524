"""What the process of an emulated host answers: requests of its parent, which started it by `cluster_hosts.Workers`.

Requests come as lines of JSON on stdin, `[method, arguments]`; each is answered by one line on stdout, which carries
nothing else: what libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import command_line


def serve(worker: Any) -> None:
    """Answers requests for methods of a worker until stdin closes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        method, arguments = json.loads(line)
        function: Callable[..., Any] = getattr(worker, method)
        with command_line():
            try:
                answer = {"value": function(**arguments)}
            except ConfigError as error:
                answer = {"mistake": str(error)}
        print(json.dumps(answer), file=answers)
