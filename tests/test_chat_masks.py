"""Which tokens of 200 conversations of odd shapes are learned, token for token as transformers has them.

The oracle is `apply_chat_template(return_assistant_tokens_mask=True)` with templates that mark answers; here the same
templates without marks must give the same tokens, and with marks too.
"""

import json
import zlib

import numpy as np
import pytest
from chat_cases import RECORDED, SHAPES, TEMPLATES, conversations, runs, write_tokenizer

from jaxdl.data import Codec, Conversations
from jaxdl.data.text.chat_texts import LEARNED, ChatText

ROWS = conversations()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def masks(texts, codec):
    """Of each row [tokens, checksum, runs of the mask], or why it was left out; of a row's text the first is never."""
    for text in (text for part in texts.parts(1 << 20) for text in texts.rows(part)):
        if not isinstance(text, ChatText):
            yield text
            continue
        tokens, index = texts.encode(codec, [text], np.dtype("<u4"))
        learned, tokens = tokens & LEARNED != 0, (tokens & (LEARNED - 1)).astype("<i4")
        assert index.tolist()[0][::2] == [len(tokens), learned.sum()]
        yield [len(tokens), zlib.crc32(tokens.tobytes()), runs(learned)]


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_tokens_of_answers_are_those_of_transformers(style, file, tmp_path):
    recorded = json.loads(RECORDED.read_text())[style]
    for marked in (False, True):
        tokenizer = write_tokenizer(tmp_path / f"{style}{marked}", style, marked)
        data = Conversations(paths=(str(file),), tokenizer=tokenizer)
        assert data.chat_template().marks_answers() == marked
        found = list(masks(data.texts(), Codec(tokenizer)))
        other = [
            (number, SHAPES[number % len(SHAPES)], case, right)
            for number, (case, right) in enumerate(zip(found, recorded, strict=True))
            if (case != right if right is not None else isinstance(case, list))
        ]
        assert not other, f"{len(other)} of {len(found)}, {marked=}: {other[:3]}"
