"""The layout of OLMo 2: norms come after attention and MLP, queries and keys are normed over all heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxdl.inference.convert.layouts import Tensor
from jaxdl.inference.convert.llama import Llama
from jaxdl.inference.convert.settings import Settings
from jaxdl.models import Transformer


class Olmo2(Llama):
    """OLMo 2."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    qk_norm = "all"
    others = (*Llama.others, "clip_qkv")
    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

    def check_fixed(self, settings: Settings) -> None:
        """Raises ConfigError for settings of which jaxdl computes one value alone."""
        super().check_fixed(settings)
        settings.must("clip_qkv", None, missing=None)

    def further(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Where the norms are."""
        del config
        return {"norm_place": "after"}

    def tensors(self, model: Transformer) -> Iterator[Tensor]:
        """All tensors of a model."""
        names = {"attention_norm/scale": ("post_attention", "attention_out_norm"),
                 "mlp_norm/scale": ("post_feedforward", "mlp_out_norm")}  # fmt: skip
        for tensor in super().tensors(model):
            if tensor.params[0] in names:
                there, here = names[tensor.params[0]]
                tensor = Tensor(f"model.layers.{{}}.{there}_layernorm.weight", (f"{here}/scale",), 0)
            yield tensor
