"""The layout of SmolLM3: some layers do not know positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.llama import Llama
from jaxdl.inference.convert.settings import COUNT, FULL, SLIDING, Form, layer_types, windows
from jaxdl.models import Transformer

_SWITCHES = Form("a list of 0 and 1", lambda x: isinstance(x, list) and all(each in (0, 1) for each in x))


class SmolLM3(Llama):
    """SmolLM3."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    forms: ClassVar[Mapping[str, Form]] = {
        **Llama.forms, "no_rope_layers": _SWITCHES.or_null, "no_rope_layer_interval": COUNT,
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 32_768, "num_key_value_heads": 4, "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None, "no_rope_layer_interval": 4,
    }  # fmt: skip

    def windows(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """How many tokens a token sees: without `layer_types` it is the layers without positions that have a window."""
        window = config["sliding_window"] if config["use_sliding_window"] else None
        kinds = [FULL if rotates or window is None else SLIDING for rotates in _switches(config)]
        return windows(config, window, kinds)

    def further(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The layers that do not know positions."""
        return {"unrotated_layers": tuple(layer for layer, rotates in enumerate(_switches(config)) if not rotates)}

    def config(self, model: Transformer, length: int) -> dict[str, Any]:
        """The fields of config.json that are about the model."""
        return super().config(model, length) | {
            "no_rope_layers": [int(layer not in model.unrotated_layers) for layer in range(model.num_layers)],
            "sliding_window": model.window,
            "use_sliding_window": model.window is not None,
            "layer_types": layer_types(model),
        }


def _switches(config: Mapping[str, Any]) -> list[int]:
    """Whether each layer rotates. Raises ConfigError where they are fewer than layers."""
    num, given = config["num_hidden_layers"], config.get("no_rope_layers")
    if given is None:
        return [int((layer + 1) % config["no_rope_layer_interval"] != 0) for layer in range(num)]
    if len(given) < num:
        raise ConfigError(f"no_rope_layers has {len(given)} entries for {num} layers. Fetch the file again.")
    return given[:num]
