"""What the layouts of encoders that classify texts share: their heads, the names of classes, older names of tensors."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.data import Codec, DataSpec, LabelledTextSpec
from jaxdl.data.text.framing import Framer
from jaxdl.inference.convert.layouts import HFLayout, Tensor
from jaxdl.inference.convert.settings import COUNT, OBJECT, Settings
from jaxdl.inference.convert.tensors import Stored
from jaxdl.models import Encoder
from jaxdl.training.tasks import Classification, Task

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
               "silu": "silu", "swish": "silu", "tanh": "tanh"}  # fmt: skip
"""The names of activations in a config.json -> those of an `Encoder`."""
NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu", "tanh": "tanh"}
"""The same, the other way round."""
_HOW_ONLY = frozenset({"remat", "dropout", "attention_dropout", "head_dropout", "head_drops_input", "init_stddev",
                       "vocab_size", "lora", "mlp_dim", "window", "global_every"})  # fmt: skip
"""Fields of an `Encoder` that do not change what a trained one computes, or that are compared resolved."""
_STDDEV = 0.02
_SHOWN = 3
_ROOM = 64
"""More tokens than any tokenizer puts around a text."""
_OLD = {".gamma": ".weight", ".beta": ".bias"}
"""Ends of names in checkpoints that were made of TensorFlow's, and those of today."""


class Fresh(Stored):
    """A tensor that the checkpoint lacks, with random numbers, zeros or ones, the same ones each time."""

    def read(self) -> np.ndarray:
        """The tensor."""
        if len(self.shape) == 1:
            return np.full(
                self.shape, float("norm" in str(self.path) and str(self.path).endswith("weight")), np.float32
            )
        return (_STDDEV * np.random.default_rng(0).standard_normal(self.shape)).astype(np.float32)


class EncoderLayout(HFLayout):
    """A layout of an encoder with a head that classifies."""

    kind = "encoder"
    reads_sentencepiece = False
    classifies = True
    others = ("is_causal", "gradient_checkpointing", "output_past")
    head: ClassVar[tuple[str, ...]] = ("classifier.",)
    """What the names of the tensors of the head begin with; a checkpoint may lack them."""
    other_heads: ClassVar[tuple[str, ...]] = ()
    """What the names of tensors begin with that are of heads for other tasks, such as guessing masked words."""

    @abc.abstractmethod
    def model(self, config: Mapping[str, Any]) -> Encoder:
        """The model of a config.json. Raises ConfigError for what jaxdl does not compute, KeyError if one lacks."""

    @abc.abstractmethod
    def tensors(self, model: Encoder) -> Iterator[Tensor]:
        """All tensors of a model."""

    def length(self, config: Mapping[str, Any]) -> int:
        """How many tokens a model of this config reads."""
        return self.model(config).max_length

    def check(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError for a setting of another type, out of range, or that is not known; and for what is no
        classification into single classes."""
        for name in ("is_decoder", "is_causal"):
            Settings(config).must(name, False, None, missing=False)
        super().check(config)
        for name, form in {"num_labels": COUNT, "id2label": OBJECT.or_null}.items():
            if name in config:
                form.check(name, config[name])
        if (problem := config.get("problem_type")) not in (None, "single_label_classification"):
            raise ConfigError(f"problem_type = {problem!r} is not converted: jaxdl's encoders choose one class.")
        class_names(config)

    def spec(self, config: Mapping[str, Any], vocab_size: int, length: int) -> DataSpec:
        """The texts that the network reads, and its classes."""
        model = self.model(config)
        return LabelledTextSpec(vocab_size, length, class_names(config), max(1, model.num_types))

    def task(self) -> Task:
        """Classification."""
        return Classification()

    def about(self, spec: Any) -> dict[str, Any]:
        """The settings of a config.json that name the classes."""
        names = spec.class_names
        return {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": "single_label_classification",
        }

    def around(self, codec: Codec) -> tuple[Sequence[int], Sequence[int]] | None:
        """Those of a tokenizer that puts nothing around a text itself."""
        framer = Framer(codec, _ROOM)
        return None if framer.frames_itself else (framer.before, framer.after)

    def arranged(
        self, stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Mapping[str, Stored], tuple[str, ...]]:
        """(the tensors under the names of today, with a fresh head where there is none; what a user should know)."""
        named = {_renamed(name): tensor for name, tensor in stored.items()}
        other = [name for name in named if name.startswith(self.other_heads)] if self.other_heads else []
        named = {name: tensor for name, tensor in named.items() if name not in other}
        if not any(name.startswith(self.prefix) for name in named):  # The encoder alone, whose names lack the prefix.
            named = {self.prefix + name: tensor for name, tensor in named.items()}
        new = [name for name in shapes if name.startswith(self.head) and name not in named]
        named |= {name: Fresh(Path(name), "F32", shapes[name], 0) for name in new}
        return named, (*_about_other(other), *self._about_head(new))

    def _about_head(self, new: Sequence[str]) -> tuple[str, ...]:
        if not new:
            return ()
        return (
            f"the checkpoint lacks {'a' if len(new) > 1 else 'part of the'} head that classifies, so there is a fresh "
            f"one ({_some(new)}), whose answers mean nothing before it is trained: python -m jaxdl.train --data "
            "labelled_texts --init-from WORKDIR",
        )

    def other(self, model: Any) -> list[str]:
        """What a model computes otherwise than any model of this layout, `norm_position=pre`."""
        if model.kind != self.kind:
            return [f"model={model.kind}"]
        here = _fields(model)
        try:
            there = _fields(self.model(self.config(model, model.max_length)))
        except ConfigError as error:
            return [str(error)]
        return [f"{name}={here[name]}" for name in here if here[name] != there.get(name)]


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes of a config.json, by number. Raises ConfigError for what names none, or one twice."""
    given = config.get("id2label")
    if given is None:
        if config.get("num_labels") == 1:
            raise ConfigError("num_labels = 1 is one class alone: a network that gives a number is not converted.")
        return tuple(f"LABEL_{number}" for number in range(config.get("num_labels", 2)))
    try:
        by_number = {int(number): str(name) for number, name in given.items()}
    except ValueError:
        raise ConfigError("id2label: its keys must be the numbers of the classes. Correct it there.") from None
    names = tuple(by_number[number] for number in sorted(by_number))
    if sorted(by_number) != [*range(len(names))] or len(set(names)) != len(names):
        raise ConfigError(f"id2label: {len(names)} classes must have the numbers from 0 and different names. Correct "
                          "it there.")  # fmt: skip
    if len(names) < 2:
        raise ConfigError("id2label has one class alone: a network that gives a number is not converted.")
    return names


def activation(config: Mapping[str, Any], name: str, missing: str) -> Any:
    """The activation that a setting names. Raises ConfigError for another."""
    value = config.get(name, missing)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise ConfigError(f"{name} = {value!r} is not converted, only {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[value]


def norm(name: str, here: str, *, bias: bool = True) -> Iterator[Tensor]:
    """The tensors of a norm."""
    yield Tensor(f"{name}.weight", (f"{here}/scale",), 0)
    if bias:
        yield Tensor(f"{name}.bias", (f"{here}/bias",), 0)


def product(name: str, here: str, num_inputs: int = 1, *, bias: bool = True) -> Iterator[Tensor]:
    """The tensors of a product with weights, [out, in] there."""
    yield Tensor(f"{name}.weight", (here,), num_inputs, transposed=True)
    if bias:
        yield Tensor(f"{name}.bias", (f"{here}_bias",), 0)


def classifier(name: str) -> Iterator[Tensor]:
    """The tensors of the classifier."""
    yield Tensor(f"{name}.weight", ("classifier/kernel",), 1, transposed=True)
    yield Tensor(f"{name}.bias", ("classifier/bias",), 0)


def _fields(model: Encoder) -> dict[str, Any]:
    fields = {name: getattr(model, name) for name in type(model).model_fields if name not in _HOW_ONLY}
    for name in ("rope_theta", "local_rope_theta") if model.positions == "learned" else ():
        del fields[name]
    windows = tuple(map(model.window_of, range(model.num_layers)))
    if not any(windows):
        fields.pop("local_rope_theta", None)
    return fields | {"mlp_dim": model.hidden_dim, "window": windows}


def _renamed(name: str) -> str:
    return next((name.removesuffix(old) + new for old, new in _OLD.items() if name.endswith(old)), name)


def _about_other(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (f"left out, as they are for another task: {_some(names)}",)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
