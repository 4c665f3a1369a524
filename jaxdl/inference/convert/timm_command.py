"""The commands `from-timm FILE WORKDIR` and `to-timm WORKDIR FOLDER`; JAX is imported when they act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxdl.core.errors import ConfigError
from jaxdl.core.options import parse_options, split_words
from jaxdl.core.runs import check_checkpoint, check_run
from jaxdl.inference.convert import HF_CONFIG, SINGLE

_PROG = "python -m jaxdl.convert"
_NUM_PATHS = 2
_PICKLES = (".pth", ".pt", ".bin", ".pkl", ".tar")
Act = Callable[[Callable[[int, int], None]], str]


@dataclass(frozen=True)
class FromTimm:
    """Makes a workdir of an image network of timm or torchvision (ResNet, ViT): from-timm FILE WORKDIR."""

    size: int | None = None
    """Height and width of its images in pixels; None: as the file says, or 224."""
    mean: tuple[float, float, float] | None = None
    """Mean of red, green and blue, from 0 to 1, by which images are normalized; None: as the config.json beside the
    file says, or that of ImageNet."""
    std: tuple[float, float, float] | None = None
    """Their standard deviation."""
    class_names: Path | None = None
    """A text file with the name of a class in each line; None: those of the config.json, if it has them."""


@dataclass(frozen=True)
class ToTimm:
    """Writes the image network of a run as timm stores it: to-timm WORKDIR FOLDER."""

    step: Literal["newest", "best"] | int = "newest"
    """The checkpoint: the newest, the one with the best evaluation, or the one of a step."""


def from_timm_command(line: Sequence[str]) -> Act:
    """What `from-timm` does, once its line is checked. Raises ConfigError."""
    source, workdir = _paths(line, "from-timm FILE WORKDIR")
    command = parse_options(FromTimm, split_words(line, _NUM_PATHS)[1], prog=f"{_PROG} from-timm")
    if not source.exists():
        raise ConfigError(f"{source}: no such file. Give a safetensors file of timm or torchvision, or its folder.")
    if source.is_file() and source.name.lower().endswith(_PICKLES):
        raise ConfigError(
            f"{source}: a pickle, which runs code when it is read. Write it as safetensors where PyTorch is: "
            f'safetensors.torch.save_file(torch.load("{source.name}", weights_only=True), "{source.stem}.safetensors").'
        )
    if command.size is not None and command.size < 1:
        raise ConfigError(f"--size {command.size}: give 1 or more.")
    names = _class_names(command.class_names)
    from jaxdl.inference.convert.from_timm import Asked, from_timm

    asked = Asked(command.size, command.mean, command.std, names)
    return lambda progress: from_timm(source, workdir, asked, progress)


def to_timm_command(line: Sequence[str]) -> Act:
    """What `to-timm` does, once its line is checked. Raises ConfigError."""
    workdir, folder = _paths(line, "to-timm WORKDIR FOLDER")
    command = parse_options(ToTimm, split_words(line, _NUM_PATHS)[1], prog=f"{_PROG} to-timm")
    check_checkpoint(check_run(workdir), command.step)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: a file, not a folder. Choose another folder.")
    if there := [name for name in (HF_CONFIG, SINGLE) if (folder / name).exists()]:
        raise ConfigError(f"{folder}: it has a {there[0]} already. Choose another folder.")
    from jaxdl.inference.convert.to_timm import to_timm

    return lambda progress: to_timm(workdir, folder, step=command.step, progress=progress)


def _paths(line: Sequence[str], usage: str) -> tuple[Path, Path]:
    words, options = split_words(line, _NUM_PATHS)
    if len(words) < _NUM_PATHS and not {"-h", "--help"} & set(options):
        raise ConfigError(f"two paths are needed: {_PROG} {usage}.")
    first, second = (*words, "", "")[:_NUM_PATHS]
    return Path(first), Path(second)


def _class_names(path: Path | None) -> tuple[str, ...] | None:
    """The lines of a file. Raises ConfigError."""
    if path is None:
        return None
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise ConfigError(f"--class-names {path}: {error.strerror}. Give a text file.") from None
    except ValueError:
        raise ConfigError(f"--class-names {path}: not UTF-8. Write it as UTF-8.") from None
    if not all(names):
        raise ConfigError(f"--class-names {path}: line {names.index('') + 1} is empty. Give a name in each line.")
    return names
