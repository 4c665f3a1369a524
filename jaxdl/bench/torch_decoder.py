"""`jaxdl.models.Transformer` as a module of PyTorch; `bench train --against torch` times it."""

from __future__ import annotations

from typing import Any

from jaxdl.models import Transformer

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
            self.final_norm = norm()
            self.head = nn.Linear(config.embed_dim, vocab_size, bias=False)
            nn.init.normal_(self.embedding.weight, std=_TABLE_STDDEV)
            if config.tied_embeddings:
                self.head.weight = self.embedding.weight

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens).to(dtype)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.final_norm(x))

    return Decoder()


def _block(config: Transformer, dtype: Any) -> Any:
    """The class of a block: attention and MLP."""
    from torch import nn  # pyright: ignore[reportMissingImports]

    embed, hidden, head_dim = config.embed_dim, config.hidden_dim, config.head_dim
    norm = _norm(config, dtype)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.mlp_norm = norm(), norm()
            self.query, self.out = (nn.Linear(embed, embed, bias=False) for _ in range(2))
            self.key, self.value = (nn.Linear(embed, config.kv_heads * head_dim, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(embed, hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(hidden, embed, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.attention_norm(x)
            query, key, value = (
                product(y).unflatten(-1, (-1, head_dim)).transpose(1, 2)
                for product in (self.query, self.key, self.value)
            )
            query, key = (_rotated(part, config.rope_theta).to(dtype) for part in (query, key))
            grouped = config.kv_heads != config.num_heads
            y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            y = self.mlp_norm(x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    return Block


def _norm(config: Transformer, dtype: Any) -> Any:
    """The class of an RMSNorm that computes in float32."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(config.embed_dim))

        def forward(self, x: Any) -> Any:
            wide = x.float()
            inverse = (wide.square().mean(-1, keepdim=True) + config.norm_epsilon).rsqrt()
            return (wide * inverse * self.scale).to(dtype)

    return Norm


def _rotated(x: Any, theta: float) -> Any:
    """`jaxdl.models.transformer.rotate` of [batch, heads, length, head_dim], in float32."""
    import torch  # pyright: ignore[reportMissingImports]

    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
    first, second = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
