"""The status of runs: `status.json` in each workdir, what is left of failures, and a table of many runs.

`python -m jaxdl.status WORKDIR...` prints the table. Only the standard library is imported here (and rich, by what
prints), so that the command answers at once.
"""

from jaxdl.report.status.failures import KEPT_FAILURES, add_failure, keep_failure, next_failure
from jaxdl.report.status.record import Action, Reason, Record, State, read_record, utc_now, write_record
from jaxdl.report.status.rows import Row, find_workdirs, read_row, tail_rows
from jaxdl.report.status.writer import StatusWriter

__all__ = [
    "KEPT_FAILURES",
    "Action",
    "Reason",
    "Record",
    "Row",
    "State",
    "StatusWriter",
    "add_failure",
    "find_workdirs",
    "keep_failure",
    "next_failure",
    "read_record",
    "read_row",
    "tail_rows",
    "utc_now",
    "write_record",
]
