"""The picture of docs/which_axis.md: predicted times of a step with a pipeline over nodes, and with exchanges.

By the closed forms of `jaxdl.performance.planner.pipeline`; nothing in it is measured. The description of a machine and
a model in docs/data/which_axis.json has the figures that they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdl.performance.planner import pipeline
from jaxdl.report import style
from jaxdl.training.step.turns import num_messages

PIPELINE, _COLOR, _MARK = "pipeline", "#009e73", "^"
_BACKWARD, _POINTS = 2 / 3, 25


def step_sec(data: Mapping[str, Any], name: str, tokens: float) -> float:
    """Predicted seconds of a step of so many tokens with one of the exchanges of `data`, or with `PIPELINE`.

    Messages hide behind a share of the kernels: those of stages behind all, those of an exchange behind the backward
    pass.
    """
    params, nodes, rate = data["params"], data["nodes"], 1e9 * data["network_gbit"] / 8
    compute = 6 * params * tokens / (nodes * data["node_flops_per_sec"])
    if name == PIPELINE:
        microbatches, head = data["microbatches"], data["head_share"]
        kernels = pipeline.turns(compute * nodes / microbatches, head, nodes, microbatches).total_sec
        turns = num_messages(nodes, microbatches) / (2 * microbatches)
        sent = turns * pipeline.activation_bytes(tokens, data["width"], data["activation_itemsize"])
        return kernels + max(0.0, sent / rate - data["overlap"] * kernels)
    return compute + max(0.0, _bytes(data, name) / rate - data["overlap"] * _BACKWARD * compute)


def _bytes(data: Mapping[str, Any], name: str) -> float:
    """Bytes that a node sends in an exchange."""
    return pipeline.exchange_bytes(data["params"], data["nodes"], data["gradient_itemsize"], data["exchanges"][name])


def break_even(data: Mapping[str, Any], name: str) -> float:
    """Q*: the tokens of a step at which a pipeline needs to send as much as an exchange."""
    return pipeline.break_even_tokens(_bytes(data, name), data["width"], data["activation_itemsize"])


def figure(data: Mapping[str, Any]) -> bytes:
    """A PNG: the times of a step over its tokens, and Q* of each exchange.

    Args:
      data: the content of docs/data/which_axis.json.
    """
    names: Sequence[str] = list(data["exchanges"])
    low, high = data["tokens"]
    tokens = [low * (high / low) ** (number / (_POINTS - 1)) for number in range(_POINTS)]
    chosen = style.looks(names)
    drawn = style.new_figure(10, 6.4, f"Predicted, not measured: {data['title']}")
    axes = drawn.subplots()
    lines = {name: (chosen[name].color, chosen[name].mark) for name in names} | {PIPELINE: (_COLOR, _MARK)}
    times = {name: [1e3 * step_sec(data, name, count) for count in tokens] for name in lines}
    entries = []
    for name, (color, mark) in lines.items():
        axes.plot(tokens, times[name], color=color, marker=mark, markevery=4, **style.MODELLED)
        label = f"{name}, {nodes_text(data)}" if name == PIPELINE else name
        entries.append(style.line_entry(label, color, mark, **style.MODELLED))
    for name in names:
        even, color = break_even(data, name), lines[name][0]
        axes.axvline(even, color=color, lw=1.2, ls=":")
        entries.append(style.line_entry(f"Q* of {name}: {even:,.0f} tokens", color, ls=":"))
    style.dress(axes, x="tokens of a step", y="ms of a step, predicted")
    style.log_axis(axes, "x", tokens)
    style.log_axis(axes, "y", [value for of_name in times.values() for value in of_name])
    style.legend(drawn, entries)
    return style.png(drawn)


def nodes_text(data: Mapping[str, Any]) -> str:
    """The stages and micro-batches in words."""
    return f"{data['nodes']} stages, {data['microbatches']} micro-batches"
