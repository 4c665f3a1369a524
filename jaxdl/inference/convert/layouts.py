"""Layouts of Hugging Face checkpoints: how a config and the names of tensors there correspond to a `Transformer`.

A class derived from `HFLayout` is one more layout, known by the `model_type` of its config.json.
"""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.data import Codec, DataSpec, TextSpec
from jaxdl.inference.convert.older import Older
from jaxdl.inference.convert.settings import COUNT, HARMLESS, NEVER, Form
from jaxdl.inference.convert.tensors import Stored
from jaxdl.models import Transformer
from jaxdl.training.tasks import LanguageModelling, Task

_layouts: dict[str, HFLayout] = {}
"""`model_type` -> its layout, in the order of definition."""
HOW_ONLY = frozenset(
    {"scan_layers", "scan_unroll", "remat", "dropout", "attention_dropout", "vocab_size", "num_kv_heads",
     "head_size", "mlp_dim", "lora", "max_length", "init_stddev", "balance_rate", "router_z_loss", "row_buffer"}
)  # fmt: skip
"""Fields of a `Transformer` that do not change what a trained one computes, or that are compared resolved."""


@dataclass(frozen=True)
class Tensor:
    """A tensor there, and the parameters here that it holds side by side in its last dimension."""

    name: str
    """Its name, with `{}` in place of the layer's number, and `{expert}` of an expert's."""
    params: tuple[str, ...]
    """The names of the parameters, `attention/query`; those of a layer as in its block."""
    num_inputs: int
    """How many leading dimensions of a parameter are one dimension there, the first; the others are the second. With 0
    the tensor is a vector."""
    transposed: bool = False
    """Whether the two dimensions change places, as in PyTorch's linear layers, [out, in]."""
    after_first: bool = False
    """Whether the first layer has none."""

    @property
    def in_layers(self) -> bool:
        """Whether every layer has one."""
        return "{}" in self.name

    @property
    def in_experts(self) -> bool:
        """Whether every expert of a layer has one."""
        return "{expert}" in self.name

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The tensor's shape, from those of the parameters."""
        num = self.num_inputs
        columns = sum(math.prod(shape[num:]) for shape in shapes)
        both = (math.prod(shapes[0][:num]), columns) if num else (columns,)
        return both[::-1] if self.transposed else both

    def to_params(self, x: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """The parameters in a tensor, of these shapes."""
        x = x.T if self.transposed else x
        ends = np.cumsum([math.prod(shape[self.num_inputs :]) for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(x, ends[:-1], axis=-1), shapes, strict=True)]

    def to_tensor(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """The inverse of `to_params`."""
        num = self.num_inputs
        flat = [x.reshape(*((math.prod(x.shape[:num]),) if num else ()), -1) for x in params]
        x = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
        return x.T if self.transposed else x


class HFLayout(abc.ABC):
    """One layout. It registers itself when its class statement runs."""

    model_type: ClassVar[str]
    """Its name in config.json."""
    kind: ClassVar[str] = "transformer"
    """The kind of model here."""
    architecture: ClassVar[str]
    """The class of `transformers` for it."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of tensors that hold no parameters."""
    prefix: ClassVar[str] = ""
    """What all names but that of the output layer begin with; older files lack it."""
    head: ClassVar[str] = "lm_head.weight"
    """The matrix of the output layer, if it has one of its own."""
    forms: ClassVar[Mapping[str, Form]]
    """What the settings of a config.json must be that are read."""
    others: ClassVar[Collection[str]] = ()
    """The settings that `model` checks itself, and those that change nothing that a network computes."""
    reads_sentencepiece: ClassVar[bool] = True
    """Whether `transformers` reads a tokenizer.model of sentencepiece of it as what it is."""
    classifies: ClassVar[bool] = False
    """Whether such networks give whole texts a class, and read pairs of them."""
    older_tokenizer: ClassVar[Older | None] = None
    """The older form in which a checkpoint may have its tokenizer, without a tokenizer.json."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.isabstract(cls) and "model_type" in vars(cls):
            _layouts[cls.model_type] = cls()

    @abc.abstractmethod
    def model(self, config: Mapping[str, Any]) -> Transformer:
        """The model of a config.json. Raises ConfigError for what jaxdl does not compute, KeyError if one lacks."""

    @abc.abstractmethod
    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model; `length` is how many tokens it was trained on."""

    @abc.abstractmethod
    def tensors(self, model: Transformer) -> Iterator[Tensor]:
        """All tensors of a model."""

    @abc.abstractmethod
    def length(self, config: Mapping[str, Any]) -> int:
        """How many tokens a model of this config reads."""

    def spec(self, config: Mapping[str, Any], vocab_size: int, length: int) -> DataSpec:
        """What a network of this config reads: by default text of so many tokens."""
        del config
        return TextSpec(vocab_size=vocab_size, length=length, bytes_per_token=1.0)

    def task(self) -> Task:
        """What such networks are trained for."""
        return LanguageModelling()

    def about(self, spec: DataSpec) -> dict[str, Any]:
        """The fields of config.json that are about the data: by default none."""
        del spec
        return {}

    def around(self, codec: Codec) -> tuple[Sequence[int], Sequence[int]] | None:
        """(the tokens before a text, those after it) that jaxdl puts there, and the tokenizer does not; else None."""
        del codec
        return None

    def arranged(
        self, stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Mapping[str, Stored], tuple[str, ...]]:
        """(the tensors of a checkpoint under the names that are looked for, what a user should know of that).

        `shapes` are those of the tensors that are looked for.
        """
        del shapes
        return stored, ()

    def longest(self, config: Mapping[str, Any]) -> int:
        """How many it can read at most, if more are asked for."""
        return self.length(config)

    def check(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError for a setting of config.json of another type, out of range, or that is not known."""
        for name, form in {"vocab_size": COUNT, **self.forms}.items():
            if name in config:
                form.check(name, config[name])
        for name, value in config.items():
            if name in NEVER and value:
                raise ConfigError(f"{name} = {value!r} is not converted: jaxdl's Transformer has none of it.")
            known = name.startswith("_") or name in {*HARMLESS, *NEVER, *self.forms, *self.others}
            if not known and value is not None:
                raise ConfigError(
                    f"{name} = {value!r} is no setting of {self.model_type} that jaxdl knows: the network might "
                    f"compute something else than what it says. If it does not matter, take {name} out of the file."
                )

    def is_at_home(self, model: Transformer) -> bool:
        """Whether transformers does more for a model of this layout than for others that compute the same."""
        del model
        return False

    def remarks(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """What a user should know of a config.json whose settings have no exact equivalent."""
        del config
        return ()

    def other(self, model: Transformer) -> list[str]:
        """What a model computes otherwise than any model of this layout, `norm=layer`."""
        if model.kind != self.kind:
            return [f"model={model.kind}", *type(model).model_fields]
        try:
            there = computation_fields(self.model(self.config(model, 1)))
        except ConfigError as error:
            return [str(error)]
        here = computation_fields(model)
        return [f"{name}={here[name]}" for name in here if here[name] != there.get(name)]


def computation_fields(model: Transformer) -> dict[str, Any]:
    """The fields that decide what a model computes, resolved."""
    fields = {name: getattr(model, name) for name in type(model).model_fields if name not in HOW_ONLY}
    if "balance" in fields:  # A loss is for training alone.
        fields["balance"] = "bias" if fields["balance"] == "bias" else "no bias"
    if model.positions != "rotary":
        del fields["rope_theta"]
    return fields | {"kv_heads": model.kv_heads, "head_dim": model.head_dim, "mlp_dim": model.hidden_dim}


def reads(model: Any, spec: DataSpec) -> bool:
    """Whether there is a layout of this kind of model, which has been trained on such data."""
    return model.modality == spec.modality and any(layout.kind == model.kind for layout in _layouts.values())


def layouts() -> tuple[str, ...]:
    """The names of all layouts, those of encoders last."""
    return tuple(sorted(_layouts, key=lambda name: _layouts[name].kind == "encoder"))


def layout_of(config: Mapping[str, Any], where: str) -> HFLayout:
    """The layout of a config.json. Raises ConfigError for an unknown one."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _layouts:
        text = config.get("text_config")
        part = f" (the part that reads text is {text.get('model_type')})" if isinstance(text, Mapping) else ""
        raise ConfigError(f"{where}: its model_type is {model_type}{part}; jaxdl converts {', '.join(layouts())}.")
    return _layouts[model_type]


def layout_for(model: Transformer, wanted: str | None = None) -> HFLayout:
    """The layout that fits best, or the wanted one, whose models compute what a model does. Raises ConfigError."""
    known = [_layouts[wanted]] if wanted else list(_layouts.values())
    others = {layout: layout.other(model) for layout in known}
    nearest = min(
        known, key=lambda layout: (layout.kind != model.kind, len(others[layout]), not layout.is_at_home(model))
    )
    if model.users_name or others[nearest]:
        why = (
            "its class is your own" if model.users_name else f"{nearest.model_type} has no {', '.join(others[nearest])}"
        )
        raise ConfigError(f"this network has no layout of Hugging Face's: {why}. python -m jaxdl.export writes any.")
    return nearest
