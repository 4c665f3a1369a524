"""Calls a function that the driver has pickled: `python -m jaxdl.platform.spark.call FOLDER`."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from jaxdl.parallel.cluster import end_together
from jaxdl.platform.spark.processes import CALL_FILE, RESULT_FILE
from jaxdl.training.run.result import exit_codes


def main(folder: Path) -> None:
    """Calls the function, and writes what it returned; its errors become exit codes as those of `jaxdl.train` do."""
    from pyspark import cloudpickle

    with end_together(), exit_codes():
        function, args, kwargs = pickle.loads((folder / CALL_FILE).read_bytes())
        result = function(*args, **kwargs)
        (folder / RESULT_FILE).write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
