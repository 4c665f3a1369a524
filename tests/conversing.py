"""Conversations for tests: rows, files of them, and what is learned of a source."""

import json

import numpy as np

from jaxdl.data import Codec, Conversations


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def chats(number):
    return [{"messages": [user(f"question {at}"), answer("yes " * at), user("and?"), answer(f"no {at}")]}
            for at in range(1, number + 1)]  # fmt: skip


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def data(tmp_path, rows, **fields):
    (tmp_path / "rows.jsonl").write_bytes(rows if isinstance(rows, bytes) else lines(rows))
    return Conversations(paths=(str(tmp_path / "rows.jsonl"),), shards=str(tmp_path / "shards"), **fields)


def learned(source, codec=None, **fields):
    """The learned texts of each document of a source, in no order."""
    codec, found = codec or Codec(None), []
    batch = source.batch(np.arange(len(source)))
    for tokens, segments, mask in zip(batch["tokens"], batch["segments"], batch["mask"], strict=True):
        for number in range(1, segments.max() + 1):
            here = (segments[1:] == number) & mask
            found.append(codec.decode(tokens[1:][here].tolist()))
    return sorted(found)


CONFIG = """
from jaxdl.data import Conversations
from jaxdl.models import Transformer
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import LanguageModelling

def config():
    return Experiment(data=Conversations(), model=Transformer(), task=LanguageModelling(), steps=1)
"""


def show(tmp_path, path, *options):
    (tmp_path / "config.py").write_text(CONFIG)
    return ["show", "--config", str(tmp_path / "config.py"), "--data.paths", str(path),
            "--data.shards", str(tmp_path / "shards"), *options]  # fmt: skip
