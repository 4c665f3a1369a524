"""`--init-from` for networks of images: whether the classes and the colours are those that the other run knew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.files import DATA_FILE
from jaxdl.data import DataSpec, ImageSpec, spec_from_json
from jaxdl.parallel.cluster.agree import of_first_process

HEAD = "head"
"""What the names of the arrays of the layer of the classes begin with."""
_RELATIVE = 0.02
"""Means and standard deviations that differ by less are the same for a network."""


def has_other_classes(workdir: Path, spec: DataSpec | None) -> bool:
    """Whether the names of the classes of the run in a workdir are known, and are not those of `spec`.

    All processes call it.
    """
    other = _images_of(workdir, spec)
    if other is None or not isinstance(spec, ImageSpec) or not (other.class_names and spec.class_names):
        return False
    return other.class_names != spec.class_names


def colour_remark(workdir: Path, spec: DataSpec) -> str:
    """What to say where images are normalized otherwise than those of the run in a workdir; all processes call it."""
    other = _images_of(workdir, spec)
    if other is None or not isinstance(spec, ImageSpec) or spec.channels != other.channels:
        return ""
    differ = [name for name in ("mean", "std")
              if not np.allclose(getattr(spec, name), getattr(other, name), rtol=_RELATIVE)]  # fmt: skip
    if not differ:
        return ""
    option = " ".join(f"--data.photos.{name} {' '.join(f'{x:.6g}' for x in getattr(other, name))}" for name in differ)
    return (
        f"--init-from {workdir}: its images were normalized otherwise, so its network does not see these as it learned "
        f"to; {option} does as it did"
    )


def _images_of(workdir: Path, spec: DataSpec | None) -> ImageSpec | None:
    """The spec of the images of the run in a workdir; None where one of both runs has none."""

    def there() -> bytes:
        try:
            return (workdir / DATA_FILE).read_bytes()
        except OSError:
            return b""

    if not isinstance(spec, ImageSpec) or not (content := of_first_process(there)):
        return None
    try:
        if json.loads(content).get("modality") != spec.modality:
            return None
        other = spec_from_json(content.decode())
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--init-from {workdir}: its {DATA_FILE} is damaged ({error}). Restore it.") from None
    return other if isinstance(other, ImageSpec) else None
