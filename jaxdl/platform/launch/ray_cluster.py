"""The connection to a Ray cluster."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from jaxdl.core.errors import ConfigError


def connect(address: str | None, option: str, **options: Any) -> Any:
    """The module `ray`, connected to the cluster at an address as `ray.init` takes it, unless it is connected already.

    `options` are further ones of `ray.init`. Raises ConfigError without Ray, and, naming `option`, without a cluster.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("--engine ray: Ray is not installed. Install it: pip install 'jaxdl[ray]'.") from None
    if not ray.is_initialized():
        try:
            with warnings.catch_warnings():  # Ray forks; its processes use nothing of JAX.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                ray.init(address, log_to_driver=False, **options)
        except (ConnectionError, ValueError, OSError) as error:
            raise ConfigError(f"{option} {address}: {error}. Give that of a Ray cluster.") from None
    return ray
