"""Makes a workdir of an image network of timm or torchvision."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdl.core.config import one_message
from jaxdl.core.errors import ConfigError
from jaxdl.data import ConvertedPhotos, ImageSpec, Photos
from jaxdl.data.images.photos import IMAGENET_MEAN, IMAGENET_STD
from jaxdl.data.phases import make_timeline
from jaxdl.inference.convert import HF_CONFIG, resnet, vit  # noqa: F401  (these register their layouts)
from jaxdl.inference.convert.checkpoint import Progress
from jaxdl.inference.convert.from_hf import all_or_nothing, begun_state, check_new, save_run
from jaxdl.inference.convert.image_layouts import ImageLayout, layout_of_tensors, to_arrays
from jaxdl.inference.convert.tensors import find_tensors, find_tensors_in
from jaxdl.models import Model, ViT
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.training.experiment import Experiment, identity
from jaxdl.training.run.plan.build import make_parts
from jaxdl.training.run.workdir.records import keep_spec
from jaxdl.training.run.workdir.workdir import check_workdir, claim_workdir
from jaxdl.training.tasks import Classification

_SIZE = 224
LEVELS = 255
"""What timm has as 1."""
_NO_CLASSES = 2
"""Classes of the empty head that a network without one gets."""
_WHITE = "the file does not say how its images are normalized: "


@dataclass(frozen=True)
class Asked:
    """What a user says of a network, where its files do not: see `jaxdl.inference.convert.timm_command.FromTimm`."""

    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    class_names: tuple[str, ...] | None = None


class Network:
    """An image network in a file, checked.

    Attributes:
      layout, model: how it is stored, and the model that computes what it does.
      tensors: its tensors, by name; read when they are used.
      photos, spec: how its images are cropped and normalized, and its classes.
      remarks: what the user should know.
    """

    def __init__(self, path: Path, asked: Asked) -> None:
        """Raises ConfigError for what is no such file, and for a network that jaxdl cannot compute."""
        stored = find_tensors(path) if path.is_dir() else find_tensors_in(path)
        self.path, config = path, _config(path)
        self.layout: ImageLayout = layout_of_tensors({name: x.shape for name, x in stored.items()}, str(path))
        self.tensors = self.layout.prepared(
            {name: x.read() for name, x in stored.items() if not self.layout.is_ignored(name)}
        )
        shapes = {name: x.shape for name, x in self.tensors.items()}
        self.remarks: list[str] = []
        try:
            with one_message():
                self.model: Model = self.layout.model(shapes, self._arguments(config))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        num_classes = self._head(shapes)
        size = asked.size or _input_size(config) or self.layout.size(shapes) or _SIZE
        if isinstance(patch := getattr(self.model, "patch", 1), int) and size % patch:
            raise ConfigError(f"--size {size}: no multiple of {patch}, the size of a patch.")
        mean, std = self._levels(config, asked)
        names = asked.class_names or _names(config)
        if names and len(names) != num_classes:
            raise ConfigError(f"{path}: it has {num_classes:,} classes, and {len(names):,} names were given.")
        crop = _setting(config, "crop_pct")
        self.photos = Photos(
            size=size, eval_fraction=crop if isinstance(crop, int | float) else self.layout.crop, mean=mean, std=std
        )
        self.spec = ImageSpec(size, size, 3, num_classes, mean, std, tuple(names))

    def arrays(self, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Path -> array, of a network whose arrays have these shapes. Raises ConfigError."""
        return to_arrays(self.layout, self.model, shapes, self.tensors, str(self.path))

    def _head(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The number of classes; a network without a head gets an empty one."""
        if self.layout.head in shapes:
            return shapes[self.layout.head][0]
        embed = shapes["layer4.0.downsample.0.weight"][0] if "layer4.0.downsample.0.weight" in shapes else 512
        embed = getattr(self.model, "embed_dim", embed)
        bias = self.layout.head.replace("weight", "bias")
        self.tensors |= {
            self.layout.head: np.zeros((_NO_CLASSES, embed), np.float32), bias: np.zeros(_NO_CLASSES, np.float32)
        }  # fmt: skip
        self.remarks.append("it has no head: it makes features, and must be trained before it names classes")
        return _NO_CLASSES

    def _levels(self, config: Mapping[str, Any], asked: Asked) -> tuple[Any, Any]:
        """Mean and standard deviation of the colours, in grey levels."""
        values = []
        for name, default in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)):
            given = getattr(asked, name) or _setting(config, name)
            levels = tuple(LEVELS * float(x) for x in given) if given else default
            if len(levels) != 3 or not all(math.isfinite(x) for x in levels) or (name == "std" and min(levels) <= 0):
                raise ConfigError(f"--{name} {given}: give three numbers, for red, green and blue from 0 to 1.")
            values.append(levels)
        if not (asked.mean or _setting(config, "mean")):
            half = (
                ". Many ViTs of timm were trained with --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5"
                if isinstance(self.model, ViT)
                else ""
            )
            self.remarks.append(f"{_WHITE}as ImageNet's are usual, mean 0.485 0.456 0.406, is taken{half}")
        return values[0], values[1]

    def _arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """timm's arguments of the network. Raises ConfigError where the file says that it computes something else."""
        architecture, arguments = config.get("architecture"), config.get("model_args") or {}
        if architecture is None:
            self.remarks.append(
                f"no config.json says which network of timm or torchvision it is: it is taken for a plain "
                f"{self.layout.name}, as parts without tensors (activations, anti-aliasing, pooling) cannot be checked"
            )
        elif not re.fullmatch(rf"({self.layout.architectures})(\..*)?", str(architecture)):
            raise ConfigError(
                f"{architecture} is no network that jaxdl is known to compute. If it computes what a plain "
                f"{self.layout.name} does, take architecture out of its config.json."
            )
        if not isinstance(arguments, dict):
            raise ConfigError(f"model_args = {arguments!r} of its config.json must be an object.")
        if other := [name for name in arguments if name not in self.layout.arguments]:
            raise ConfigError(
                f"{other[0]} = {arguments[other[0]]!r} in model_args of its config.json is not converted."
            )
        pool = _setting(config, "global_pool")
        return ({} if pool is None else {"global_pool": pool}) | arguments


def from_timm(path: Path, workdir: Path, asked: Asked, progress: Progress = lambda done, every: None) -> str:
    """Makes a workdir, with a checkpoint of step 0, of the network in a file; returns a text on what was made.

    Raises ConfigError for what cannot be converted, and for a workdir with a run.
    """
    network = Network(path, asked)
    check_workdir(workdir)
    check_new(workdir)
    with contextlib.suppress(ConfigError):  # In a program that runs on other devices these will do.
        start_devices(MeshConfig(cpu_devices=1))
    with all_or_nothing(workdir):
        count = _write_run(network, workdir)
    progress(1, 1)
    spec, photos = network.spec, network.photos
    levels = ", ".join(
        f"{name} {' '.join(f'{x / LEVELS:.4g}' for x in values)}"
        for name, values in (("mean", spec.mean), ("std", spec.std))
    )
    lines = [
        f"{path} is now the run {workdir}: {network.layout.name}, {count:,} parameters, {spec.num_classes:,} classes",
        f"its images are {spec.height} x {spec.width} pixels, the centre {100 * photos.eval_fraction:.4g} %, {levels}",
        *network.remarks,
    ]
    if not spec.class_names:
        lines.append("the names of its classes are not known: predictions have their numbers (--class-names FILE)")
    return "\n".join(lines)


def _write_run(network: Network, workdir: Path) -> int:
    """Writes the run; returns its number of parameters. Raises ConfigError."""
    experiment = Experiment(
        model=network.model,
        data=ConvertedPhotos(photos=network.photos),
        task=Classification(),
        optimizer=SGD(momentum=0),
        schedule=Constant(),
        steps=1,
    )
    try:
        mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
        parts = make_parts(experiment, network.spec, mesh, make_timeline(1, 1, epochs=None, steps=1))
        state = parts.state_spec.shapes
        arrays = network.arrays(flat((state.params, state.model_state)))
        claim_workdir(workdir, experiment, identity)
        keep_spec(workdir, network.spec)
        params, stats = (_like(tree, arrays) for tree in (state.params, state.model_state))
        save_run(workdir, parts, begun_state(parts, params, stats))
    except OSError as error:
        raise ConfigError(f"{workdir}: {error.strerror}. Choose a folder with room that can be written.") from None
    return sum(math.prod(x.shape) for x in jax.tree.leaves(parts.network.param_shapes))


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flat(trees: tuple[Any, ...]) -> dict[str, Any]:
    """Path -> array of nested dictionaries, all together."""
    every = (item for tree in trees for item in jax.tree_util.tree_flatten_with_path(tree)[0])
    return {_path(path): x for path, x in every}


def _like(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_path(path)], tree)


def _config(path: Path) -> dict[str, Any]:
    """The content of the config.json beside the tensors, if there is one, as timm writes it."""
    file = path / HF_CONFIG if path.is_dir() else path.with_name(HF_CONFIG)
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
        assert isinstance(config, dict)
        return config
    except (OSError, ValueError, AssertionError):
        raise ConfigError(f"{file}: it cannot be read as the config of a network. Fetch it again.") from None


def _setting(config: Mapping[str, Any], name: str) -> Any:
    inner = config.get("pretrained_cfg")
    return (inner if isinstance(inner, dict) else {}).get(name, config.get(name))


def _input_size(config: Mapping[str, Any]) -> int | None:
    size = _setting(config, "input_size")
    is_size = isinstance(size, list) and len(size) == 3 and all(isinstance(x, int) for x in size)
    return int(size[-1]) if is_size else None


def _names(config: Mapping[str, Any]) -> Sequence[str]:
    """The names of the classes, if the config has them."""
    names = _setting(config, "label_names") or ()
    return tuple(map(str, names)) if isinstance(names, list) else ()
