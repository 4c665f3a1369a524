"""Records small files of torch.save, as text: tests/torch_bin.json.

It needs PyTorch: python scripts/record_torch_bin.py
"""

import base64
import io
import json
import os
from collections import OrderedDict
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

RECORDED = Path(__file__).parent.parent / "tests" / "torch_bin.json"


class _Harmful:
    """A pickle of it calls os.mkdir."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("was_executed",)


def main() -> None:
    """Writes the file: name -> the bytes of a file, in base64."""
    numbers = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = OrderedDict(
        plain=numbers,
        half=numbers.bfloat16(),
        turned=numbers.t(),
        part=numbers[1:, 2:],
        parameter=torch.nn.Parameter(numbers[0]),
        empty=numbers[:0],
    )
    state = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(state.weight, 0.5)
    cases = {
        "tensors": tensors,
        "state": state.state_dict(),  # It has metadata beside its tensors.
        "inside": {"state_dict": {"plain": numbers}, "epoch": 3},
        "harmful": {"plain": numbers, "x": _Harmful()},
        "module": state,
        "number": {"plain": numbers, "epoch": 3},
        "list": [numbers],
        "older": {"plain": numbers},
    }
    found = {}
    for name, content in cases.items():
        file = io.BytesIO()
        torch.save(content, file, _use_new_zipfile_serialization=name != "older")
        found[name] = base64.b64encode(file.getvalue()).decode()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
