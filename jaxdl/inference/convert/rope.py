"""Reads and writes the settings of rotary positions in a config.json of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.settings import COUNT, FLAG, POSITIVE, TEXT, Form
from jaxdl.models import RopeScaling, Transformer

_FACTORS = Form("a list of numbers above 0", lambda x: isinstance(x, list) and bool(x) and all(map(POSITIVE.holds, x)))
_COMMON = {"rope_type": TEXT, "type": TEXT, "rope_theta": POSITIVE.or_null, "partial_rotary_factor": POSITIVE.or_null}
"""The settings of every kind of rotary positions."""
_ORIGINAL = {"original_max_position_embeddings": COUNT.or_null}
_KINDS: Mapping[str, Mapping[str, Form]] = {
    "default": {},
    "linear": {"factor": POSITIVE},
    "dynamic": {"factor": POSITIVE},
    "llama3": {"factor": POSITIVE, "low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE, **_ORIGINAL},
    "yarn": {"factor": POSITIVE.or_null, **_ORIGINAL, "truncate": FLAG.or_null, **dict.fromkeys(
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), POSITIVE.or_null)},
    "longrope": {"factor": POSITIVE.or_null, **_ORIGINAL, "attention_factor": POSITIVE.or_null,
                 "short_factor": _FACTORS, "long_factor": _FACTORS},
}  # fmt: skip
"""The kinds of rotary positions, and what the settings of each must be."""


class Rope(NamedTuple):
    """Rotary positions.

    Attributes:
      theta: their base.
      scaling: how wavelengths are stretched.
      share: of the numbers of a head, that which is rotated.
    """

    theta: float
    scaling: RopeScaling | None
    share: float

    def dim(self, head_dim: int) -> int | None:
        """How many numbers of a head are rotated; None: all."""
        dim = int(head_dim * self.share)
        return None if dim == head_dim else dim


def read_rope(config: Mapping[str, Any], *, partial: bool = False) -> Rope:
    """The rotary positions of a config.json, in the form of transformers 4 or 5.

    Raises ConfigError for what jaxdl does not compute; `partial` says that a share of the numbers may be rotated.
    """
    rope = rope_settings(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if several := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ConfigError(f"rope_parameters of each kind of layer, {', '.join(several)}, are not converted.")
    return read_kind(config, rope, kind, partial=partial)


def read_kind(config: Mapping[str, Any], rope: Mapping[str, Any], kind: Any, *, partial: bool = False) -> Rope:
    """The rotary positions of these settings, which are those of a kind. Raises ConfigError as `read_rope` does."""
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"rope_type = {kind!r} is not converted, only {', '.join(_KINDS)}.")
    forms = {**_COMMON, **_KINDS[kind]}
    for name, value in rope.items():
        if name in forms:
            forms[name].check(name, value)
        elif value is not None:
            raise ConfigError(
                f"{name} = {value!r} of rotary positions is not converted: rope_type {kind} has no such setting that "
                "jaxdl computes."
            )
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share > 1 or (share != 1 and not partial):
        raise ConfigError(f"partial_rotary_factor = {share} is not converted: this layout rotates whole heads.")
    return Rope(theta, _scaling(config, rope, kind), share)


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5 or `rope_scaling` of transformers 4. Raises ConfigError where they differ."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if differ := [name for name in new if name in old and new[name] != old[name]]:
        raise ConfigError(
            f"rope_parameters and rope_scaling differ in {differ[0]}: {new[differ[0]]!r} and {old[differ[0]]!r}. Take "
            "one of them out."
        )
    return {**old, **new}


def _scaling(config: Mapping[str, Any], rope: Mapping[str, Any], kind: str) -> RopeScaling | None:
    if kind == "default":
        return None
    longest = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or longest
    factor = rope.get("factor") if kind in ("yarn", "longrope") else rope["factor"]
    factor = longest / original if factor is None else factor
    values: dict[str, Any] = {"form": kind, "factor": factor}
    if kind == "dynamic":
        values["original_length"] = longest
    elif kind != "linear":
        values["original_length"] = original
    if kind == "llama3":
        values |= {name: rope[name] for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "longrope":
        values |= {"short_factors": rope["short_factor"], "long_factors": rope["long_factor"]}
        values["factor"] = max(factor, 1.0)
    if kind == "yarn":
        names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        values |= {here: rope[there] for here, there in names.items() if rope.get(there)}
        values["whole_bounds"] = rope.get("truncate") is not False
    if kind in ("yarn", "longrope"):
        values["attention_factor"] = rope.get("attention_factor") or _of_mscales(rope, factor)
    return RopeScaling(**values)


def _of_mscales(rope: Mapping[str, Any], factor: float) -> float | None:
    """The factor of queries and keys that two settings of DeepSeek's give; None without them."""
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return None
    above, below = (0.1 * rope[name] * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim"))
    return above / below


def rope_fields(model: Transformer) -> dict[str, Any]:
    """The settings of rotary positions: `rope_parameters` of transformers 5, the others of transformers 4."""
    rope = write_rope(model)
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": model.rope_theta},
    }


def write_rope(model: Transformer) -> dict[str, Any]:
    """The settings of the stretch of a model's wavelengths."""
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    rope: dict[str, Any] = {"rope_type": scaling.form, "factor": scaling.factor}
    if scaling.form == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.form == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.whole_bounds}
    if scaling.form == "longrope":
        rope |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    if scaling.attention_factor is not None:
        rope["attention_factor"] = scaling.attention_factor
    if scaling.form not in ("linear", "dynamic"):
        rope["original_max_position_embeddings"] = scaling.original_length
    return rope


def rope_length(model: Transformer, length: int) -> int:
    """`max_position_embeddings` of a network that reads `length` tokens: with `dynamic` it says when theta grows."""
    scaling = model.rope_scaling
    return scaling.original_length if scaling is not None and scaling.form == "dynamic" else length


def share_of(model: Transformer) -> float:
    """The share of the numbers of a head that is rotated, as transformers reads it: int(head_dim * share)."""
    share = model.rotated / model.head_dim
    return share if int(model.head_dim * share) == model.rotated else math.nextafter(share, 2)
