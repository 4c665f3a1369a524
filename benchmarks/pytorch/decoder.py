"""`jaxdl.models.Transformer` as a module of PyTorch; `python -m benchmarks.train --against torch` times it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.models import Transformer
from jaxdl.models.rotary import RopeScaling

_TABLE_STDDEV = 0.02


def decoder(config: Transformer, vocab_size: int, dtype: Any) -> Any:
    """A module: tokens [batch, length] -> logits [batch, length, vocab].

    The residual stream is in `dtype`, as jaxdl's; `layers` are blocks with the weights of one each.
    """
    from torch import nn  # pyright: ignore[reportMissingImports]

    norm, block = _norm(config, dtype), _block(config, dtype)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, config.embed_dim)
            self.layers = nn.ModuleList(block() for _ in range(config.num_layers))
            self.final_norm = norm(config.embed_dim)
            self.head = nn.Linear(config.embed_dim, vocab_size, bias=False)
            nn.init.normal_(self.embedding.weight, std=_TABLE_STDDEV)
            self.position_embedding = nn.Embedding(config.max_length, config.embed_dim) if config.max_length else None
            if config.tied_embeddings:
                self.head.weight = self.embedding.weight

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens).to(dtype)
            if self.position_embedding is not None:
                x = x + self.position_embedding.weight[: tokens.shape[1]].to(dtype)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.final_norm(x))

    return Decoder()


def set_params(model: Any, params: Mapping[str, Any]) -> None:
    """Sets the parameters of a decoder to jaxdl's, whose layers may be stacked. Raises ValueError if any is left."""
    import torch  # pyright: ignore[reportMissingImports]

    done = set()
    with torch.no_grad():
        for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
            names = [key.key for key in path]
            stacked = names[0] == "layers"
            for index, one in enumerate(np.asarray(value) if stacked else [np.asarray(value)]):
                param = _named(model, [f"layer_{index}", *names[1:]] if stacked else names)
                # A linear layer of PyTorch has [out, in], with one dimension for heads; jaxdl's head has [in, out].
                transposed = names[-1] in _LINEAR or names == ["head"]
                matrix = one.reshape(param.shape[::-1]).T if transposed else one.reshape(param.shape)
                param.copy_(torch.tensor(np.ascontiguousarray(matrix)))
                done.add(id(param))
    if left := [name for name, param in model.named_parameters() if id(param) not in done]:
        raise ValueError(f"without values: {', '.join(left)}")


_LINEAR = ("query", "key", "value", "out", "gate", "up", "down")


def _named(model: Any, names: Sequence[str]) -> Any:
    """PyTorch's parameter that is called as jaxdl's."""
    *parents, name = (part for part in names if part not in ("attention", "mlp"))
    if parents and parents[0].startswith("layer_"):
        parents[:1] = ["layers", parents[0].removeprefix("layer_")]
    owner = model.get_submodule(".".join(parents))
    if name.endswith("_bias"):
        return getattr(owner, name.removesuffix("_bias")).bias
    if name == "bias":
        return owner.bias
    if name == "scale":  # A LayerNorm of PyTorch has a weight.
        return owner.weight if getattr(owner, "scale", None) is None else owner.scale
    found = getattr(owner, name)
    return found.scale if hasattr(found, "scale") else found.weight


def in_fp8(model: Any, least: int) -> str:
    """Makes the large products of all blocks but the first and the last FP8, with torchao; in words.

    Raises ConfigError without torchao.
    """
    try:
        from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"--against torch: PyTorch has FP8 with torchao ({error}). pip install torchao.") from None

    num = 0

    def taken(module: Any, _: str) -> bool:
        nonlocal num
        large = min(module.in_features, module.out_features) >= least
        num += large
        return large

    for layer in model.layers[1:-1]:
        convert_to_float8_training(layer, module_filter_fn=taken)
    return f", torchao's FP8 in {num} linear layers, each with one scale for each tensor"


def _block(config: Transformer, dtype: Any) -> Any:
    """The class of a block: attention and MLP."""
    from torch import nn  # pyright: ignore[reportMissingImports]

    embed, hidden, head_dim = config.embed_dim, config.hidden_dim, config.head_dim
    heads, kv_heads = config.num_heads * head_dim, config.kv_heads * head_dim
    norm, scaling = _norm(config, dtype), config.rope_scaling
    theta = config.rope_theta if config.positions == "rotary" else None

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.mlp_norm = norm(embed), norm(embed)
            of_heads, of_all = config.biases != "none", config.biases == "all"
            self.query = nn.Linear(embed, heads, bias=of_heads)
            self.key, self.value = (nn.Linear(embed, kv_heads, bias=of_heads) for _ in range(2))
            self.out = nn.Linear(heads, embed, bias=of_all)
            self.query_norm, self.key_norm = (_rms(config, dtype)(head_dim) if config.qk_norm else None for _ in "qk")
            self.gate = nn.Linear(embed, hidden, bias=of_all) if config.mlp == "swiglu" else None
            self.up, self.down = nn.Linear(embed, hidden, bias=of_all), nn.Linear(hidden, embed, bias=of_all)

        def forward(self, x: Any) -> Any:
            x = x + self.out(self._mixed(self.attention_norm(x)))
            return x + self.down(self._hidden(self.mlp_norm(x)))

        def _mixed(self, x: Any) -> Any:
            query, key, value = (
                product(x).unflatten(-1, (-1, head_dim)).transpose(1, 2)
                for product in (self.query, self.key, self.value)
            )
            if self.query_norm is not None and self.key_norm is not None:
                query, key = self.query_norm(query), self.key_norm(key)
            if theta is not None:
                query, key = (_rotated(part, theta, scaling).to(dtype) for part in (query, key))
            grouped = config.kv_heads != config.num_heads
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            return mixed.transpose(1, 2).flatten(2)

        def _hidden(self, x: Any) -> Any:
            if self.gate is not None:
                return nn.functional.silu(self.gate(x)) * self.up(x)
            return nn.functional.relu(self.up(x)) if config.mlp == "relu" else gelu(self.up(x))

    def gelu(x: Any) -> Any:
        return nn.functional.gelu(x, approximate="tanh")

    return Block


def _norm(config: Transformer, dtype: Any) -> Any:
    """The class of the network's norm, which computes in float32."""
    from torch import nn  # pyright: ignore[reportMissingImports]

    if config.norm == "rms":
        return _rms(config, dtype)

    class Norm(nn.LayerNorm):
        def __init__(self, size: int) -> None:
            super().__init__(size, eps=config.norm_epsilon)

        def forward(self, input: Any) -> Any:
            return super().forward(input.float()).to(dtype)

    return Norm


def _rms(config: Transformer, dtype: Any) -> Any:
    """The class of an RMSNorm that computes in float32."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    class Norm(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(size))

        def forward(self, x: Any) -> Any:
            return nn.functional.rms_norm(x.float(), self.scale.shape, self.scale, config.norm_epsilon).to(dtype)

    return Norm


def _rotated(x: Any, theta: float, scaling: RopeScaling | None) -> Any:
    """`jaxdl.models.rotary.rotate` of [batch, heads, length, head_dim], in float32."""
    import torch  # pyright: ignore[reportMissingImports]

    half = x.shape[-1] // 2
    plain = theta ** (-np.arange(half) / half)
    frequencies = plain if scaling is None else scaling.frequencies(plain)
    frequency = torch.tensor(frequencies, device=x.device, dtype=torch.float32)
    angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    first, second = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
