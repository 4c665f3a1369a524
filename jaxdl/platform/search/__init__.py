"""Search over settings: many runs of one experiment, their settings proposed by Optuna, the good ones trained longer.

`space` has what may vary, `samplers` who proposes, `schedulers` which trial trains on (ASHA with promotion, population
based training), `engines` where trials run, `journal` what is on disk, `driver` the loop that joins them. Each trial is
an ordinary workdir and `python -m jaxdl.train` in a process of its own.
"""

import sys
import types
from typing import Any


class _CallableModule(types.ModuleType):
    """`jaxdl.search` is this package and also the function of that name, so calling the package calls the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from jaxdl.platform.search.function import search

        return search(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
