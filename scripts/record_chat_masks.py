"""Records which tokens of conversations transformers takes for the assistant's, for tests/test_chat_masks.py.

    python scripts/record_chat_masks.py

It needs transformers 5.14 or newer and jinja2, which the tests do not. The templates are those of tests/chat_cases.py
with blocks `{% generation %}`; jaxdl has to find the same tokens with them and without.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import chat_cases  # pyright: ignore[reportMissingImports]
import numpy as np
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Writes tests/chat_masks.json: of each style and conversation [tokens, checksum, runs of the mask], or null."""
    recorded: dict[str, Any] = {"transformers": transformers.__version__}
    for style in chat_cases.TEMPLATES:
        with tempfile.TemporaryDirectory() as folder:
            chat_cases.write_tokenizer(Path(folder), style, marked=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            recorded[style] = [_masks(tokenizer, row) for row in chat_cases.conversations()]
        print(style, sum(case is not None for case in recorded[style]), "rendered")
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in recorded.items()]
    chat_cases.RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _masks(tokenizer: Any, row: dict[str, Any]) -> list[Any] | None:
    """None for a conversation that the template does not take."""
    try:
        made = tokenizer.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            date_string="01 Jan 2026",
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception as error:  # Templates raise errors of several kinds.
        print("  refused:", error)
        return None
    tokens = np.asarray(made["input_ids"], "<i4")
    return [len(tokens), zlib.crc32(tokens.tobytes()), chat_cases.runs(made["assistant_masks"])]


if __name__ == "__main__":
    main()
