"""Vision transformers as timm and torchvision store them: queries, keys and values in one matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.image_layouts import Arrays, ImageLayout, Pair, Shapes, convolution, product, vector
from jaxdl.models import ViT
from jaxdl.models.vit import interpolated, positions

_SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}
HEAD_DIM = 64
_PARTS = ("query", "key", "value")


class TimmViT(ImageLayout):
    """ViT of timm: with a class token, or the mean of the tokens, normalized before or after."""

    name = "ViT of timm"
    probe = "patch_embed.proj.weight"
    head = "head.weight"
    architectures = (
        r"(vit|deit|deit3)_(tiny|small|base|large)_patch\d+_(gap_)?\d+(_in21k|_in21ft1k|_sam|_dino)?"
        r"|vit_(small|base|large)_patch14_dinov2|flexivit_(small|base|large)"
    )
    arguments = (
        *ImageLayout.arguments,
        "img_size",
        "patch_size",
        "embed_dim",
        "depth",
        "num_heads",
        "mlp_ratio",
        "qkv_bias",
        "init_values",
        "class_token",
        "no_embed_class",
        "reg_tokens",
        "fc_norm",
        "dynamic_img_size",
        "dynamic_img_pad",
        "pos_drop_rate",
        "patch_drop_rate",
        "proj_drop_rate",
        "attn_drop_rate",
        "weight_init",
    )
    crop = 0.9
    block: ClassVar[str] = "blocks.{}"
    names: ClassVar[dict[str, str]] = {
        "embedding": "patch_embed.proj", "class_token": "cls_token", "positions": "pos_embed", "norm": "norm",
        "fc_norm": "fc_norm", "head": "head", "norm1": "norm1", "qkv_weight": "attn.qkv.weight",
        "qkv_bias": "attn.qkv.bias", "out": "attn.proj", "norm2": "norm2", "up": "mlp.fc1", "down": "mlp.fc2",
    }  # fmt: skip

    def model(self, shapes: Shapes, given: Mapping[str, Any]) -> ViT:
        """By the shapes of the patches and positions, and by which parts there are."""
        names = self.names
        embed, _, patch, other = shapes[f"{names['embedding']}.weight"]
        if embed not in _SIZES or patch != other:
            raise ConfigError(f"tokens of {embed} numbers and patches of {patch} x {other}; jaxdl computes square ones "
                              f"and tokens of {', '.join(map(str, _SIZES))}.")  # fmt: skip
        token = names["class_token"] in shapes
        layers = 0
        while f"{self.block.format(layers)}.{names['norm1']}.weight" in shapes:
            layers += 1
        rows = shapes.get(names["positions"], (1, 0, 0))[1]
        grid = math.isqrt(max(0, rows - token))
        if not grid or grid * grid + token != rows:
            raise ConfigError(f"its table of positions has {rows} rows, which are not those of a square of patches.")
        size: Any = _SIZES[embed]
        default = ViT(size=size).blocks
        found = {
            "patch_size": patch, "embed_dim": embed, "depth": layers, "num_heads": embed // HEAD_DIM,
            "class_token": token,
        }  # fmt: skip
        for name, value in found.items():
            if given.get(name, value) not in (value, [value, value]):
                raise ConfigError(f"{name} = {given[name]!r} of its config is not that of its tensors, {value}.")
        return ViT(
            size=size,
            patch=patch,
            num_layers=None if layers == default else layers,
            class_token=token,
            pool=_pool(given, token=token, fc_norm=f"{names['fc_norm']}.weight" in shapes),
            positions="learned",
            grid=grid,
        )

    def size(self, shapes: Shapes) -> int | None:
        """By its positions."""
        rows = shapes[self.names["positions"]][1] - (self.names["class_token"] in shapes)
        return math.isqrt(rows) * shapes[f"{self.names['embedding']}.weight"][2]

    def prepared(self, tensors: Arrays) -> dict[str, np.ndarray]:
        """Scales of branches (LayerScale) multiplied into their last products, and a position for the class token."""
        found = {name: x for name, x in tensors.items() if not name.endswith((".ls1.gamma", ".ls2.gamma"))}
        for name, scale in tensors.items():
            for gamma, part in ((".ls1.gamma", self.names["out"]), (".ls2.gamma", self.names["down"])):
                if name.endswith(gamma):
                    there = f"{name.removesuffix(gamma)}.{part}"
                    for end in ("weight", "bias"):
                        x = np.asarray(tensors[f"{there}.{end}"], np.float32)
                        found[f"{there}.{end}"] = x * np.asarray(scale, np.float32).reshape(-1, *(1,) * (x.ndim - 1))
        place, token = self.names["positions"], self.names["class_token"]
        if token in found and place in found and math.isqrt(found[place].shape[1]) ** 2 == found[place].shape[1]:
            found[place] = np.concatenate([np.zeros_like(found[place][:, :1]), found[place]], axis=1)
        return found

    def writes(self, model: Any) -> bool:
        """Any, with the usual epsilon."""
        return model.kind == ViT.kind and model.norm_epsilon == ViT().norm_epsilon

    def to_write(self, model: Any, arrays: Arrays, size: int) -> tuple[Any, Arrays]:
        """Positions of sines become a table, and so do learned ones of images of another size."""
        grid = size // model.patch
        if model.grid == grid:
            return model, arrays
        if model.grid is None:
            table = np.asarray(positions(grid, grid, model.embed_dim))
            table = np.concatenate([np.zeros((int(model.class_token), model.embed_dim), np.float32), table])
        else:
            token, there = np.split(arrays["position_embedding"], [int(model.class_token)])
            table = np.concatenate([token, np.asarray(interpolated(jnp.asarray(there), model.grid, grid, grid))])
        changed = model.replaced({"positions": "learned", "grid": grid})
        return changed, {**arrays, "position_embedding": table}

    def timm(self, model: Any, size: int) -> tuple[str, dict[str, Any]]:
        """All arguments are given, whatever the architecture's own are."""
        return f"vit_{model.size}_patch16_224", {
            "img_size": size,
            "patch_size": model.patch,
            "depth": model.blocks,
            "class_token": model.class_token,
            "global_pool": "token" if model.pool == "token" else "avg",
            "fc_norm": model.pool == "mean_first",
        }

    def pairs(self, model: Any) -> Iterator[Pair]:
        """Patches, tokens, blocks and head."""
        names, embed = self.names, model.embed_dim
        yield convolution(f"{names['embedding']}.weight", "embedding")
        yield vector(f"{names['embedding']}.bias", "embedding_bias")
        if model.class_token:
            yield Pair(names["class_token"], ("class_token",), lambda x: [x[0, 0]], lambda parts: parts[0][None, None])
        yield Pair(names["positions"], ("position_embedding",), lambda x: [x[0]], lambda parts: parts[0][None])
        for layer in range(model.blocks):
            yield from self._block(layer, embed)
        norm = names["fc_norm"] if model.pool == "mean_first" else names["norm"]
        yield vector(f"{norm}.weight", "final_norm/scale")
        yield vector(f"{norm}.bias", "final_norm/bias")
        yield product(f"{names['head']}.weight", "head/kernel", (embed,))
        yield vector(f"{names['head']}.bias", "head/bias")

    def _block(self, layer: int, embed: int) -> Iterator[Pair]:
        names, block, heads = self.names, self.block.format(layer), (embed // HEAD_DIM, HEAD_DIM)
        for norm, here in (("norm1", "attention_norm"), ("norm2", "mlp_norm")):
            yield vector(f"{block}.{names[norm]}.weight", f"layers/{here}/scale", layer)
            yield vector(f"{block}.{names[norm]}.bias", f"layers/{here}/bias", layer)
        three = tuple(f"layers/attention/{part}" for part in _PARTS)
        yield Pair(
            f"{block}.{names['qkv_weight']}",
            three,
            lambda x: [part.T.reshape(embed, *heads) for part in np.split(x, 3)],
            lambda parts: np.concatenate([part.reshape(embed, embed).T for part in parts]),
            layer,
        )
        biases = tuple(f"{path}_bias" for path in three)
        yield Pair(f"{block}.{names['qkv_bias']}", biases, lambda x: np.split(x, 3), np.concatenate, layer)
        for there, here, inputs in (
            ("out", "attention/out", heads),
            ("up", "mlp/up", (embed,)),
            ("down", "mlp/down", (4 * embed,)),
        ):
            yield product(f"{block}.{names[there]}.weight", f"layers/{here}", inputs, layer)
            yield vector(f"{block}.{names[there]}.bias", f"layers/{here}_bias", layer)


def _pool(given: Mapping[str, Any], *, token: bool, fc_norm: bool) -> Any:
    """What the head reads. Raises ConfigError where a config says something else than the tensors."""
    usual = "token" if token and not fc_norm else "avg"
    pool, normed = given.get("global_pool", usual), given.get("fc_norm")
    if pool not in ("token", "avg") or (pool == "token" and usual == "avg"):
        raise ConfigError(f"global_pool = {pool!r} of its config is not converted with these tensors, only 'avg'"
                          f"{' or token' if usual == 'token' else ''}.")  # fmt: skip
    if normed not in (None, fc_norm):
        raise ConfigError(f"fc_norm = {normed!r} of its config is not that of its tensors, {fc_norm}.")
    return "token" if pool == "token" else "mean_first" if fc_norm else "mean"


class TorchvisionViT(TimmViT):
    """ViT of torchvision: always with a class token."""

    name = "ViT of torchvision"
    probe = "conv_proj.weight"
    head = "heads.head.weight"
    architectures = r"vit_[bl]_(16|32)"
    crop = 0.875
    block: ClassVar[str] = "encoder.layers.encoder_layer_{}"
    names: ClassVar[dict[str, str]] = {
        "embedding": "conv_proj", "class_token": "class_token", "positions": "encoder.pos_embedding",
        "norm": "encoder.ln", "fc_norm": "-", "head": "heads.head", "norm1": "ln_1",
        "qkv_weight": "self_attention.in_proj_weight", "qkv_bias": "self_attention.in_proj_bias",
        "out": "self_attention.out_proj", "norm2": "ln_2", "up": "mlp.0", "down": "mlp.3",
    }  # fmt: skip

    def writes(self, model: Any) -> bool:
        """None: timm has its own layout."""
        del model
        return False

    def prepared(self, tensors: Arrays) -> dict[str, np.ndarray]:
        """The names of now of its MLP, which were others before torchvision 0.13."""
        return {
            name.replace(".mlp.linear_1.", ".mlp.0.").replace(".mlp.linear_2.", ".mlp.3."): x
            for name, x in tensors.items()
        }
