"""The tokenizer of a run: recorded in its workdir when it begins, and compared wherever its text is encoded later.

The config names the file alone, which another may replace: its tokens would mean nothing to the network. Recorded too
is what the documents of the training begin with, so that all that reads or writes text later begins alike, and the
chat template of its conversations, or the one that came with the tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.core.files import CHAT_FILE, CODEC_FILE
from jaxdl.data import Codec, Data
from jaxdl.data.text.chat_template import ChatTemplate, own_template
from jaxdl.parallel.cluster.agree import of_first_process
from jaxdl.report import replace_file


def keep_codec(workdir: Path, data: Data) -> None:
    """Records in `codec.json` which tokenizer the data of a run have, and how documents begin, unless it is there.

    Raises ConfigError, on all processes, when it cannot be written.
    """

    def keep() -> bytes:
        path, codec = workdir / CODEC_FILE, _tokenizer(data)
        try:
            if codec is not None and not path.exists():
                content = {"kind": codec.kind, "fingerprint": codec.fingerprint(), "opening": list(codec.opening)}
                replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
            if (
                codec is not None
                and not (workdir / CHAT_FILE).exists()
                and (chat := chat_of_data(data, codec)) is not None
            ):
                replace_file(workdir / CHAT_FILE, (json.dumps(chat, indent=2) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"--workdir {workdir}: {error.strerror}. Choose a writable folder.") from None
        return b""

    of_first_process(keep)


def check_kept_codec(workdir: Path, data: Data) -> None:
    """As `check_data`, for a run that resumes: the first process compares for all."""

    def check() -> bytes:
        check_data(workdir, data)
        return b""

    of_first_process(check)


def check_data(workdir: Path, data: Data) -> None:
    """Raises ConfigError for data with another tokenizer than the one that the run in the workdir began with."""
    if (workdir / CODEC_FILE).exists() and (codec := _tokenizer(data)) is not None:
        check_codec(workdir, codec)


def check_codec(workdir: Path, codec: Codec) -> None:
    """Raises ConfigError for another tokenizer than the one that the run in the workdir began with.

    Older runs recorded none, and bytes are always the same: there is nothing to compare.
    """
    if codec.is_bytes or not (workdir / CODEC_FILE).exists():
        return
    if codec.fingerprint() != _read(workdir)["fingerprint"]:
        raise ConfigError(
            f"tokenizer {codec.tokenizer}: it is not the one that the network in {workdir} was trained with: its "
            "content differs, so its tokens may mean other texts. Put the old file back."
        )


def codec_of_run(workdir: Path, data: Data) -> Codec:
    """The codec of the run in a workdir, whose data these are: texts begin as the documents of its training did.

    An older run recorded no beginning: it follows from the config of its data. Raises ConfigError for another tokenizer
    than the run began with.
    """
    codec = data.codec()
    check_codec(workdir, codec)
    opening = _read(workdir).get("opening") if (workdir / CODEC_FILE).exists() else None
    return codec if opening is None else codec.with_opening(opening)


def chat_of_run(workdir: Path, data: Data) -> ChatTemplate | None:
    """The chat template of the run in a workdir, whose data these are; None for a run that has none of its own.

    Raises ConfigError for a damaged file.
    """
    path = workdir / CHAT_FILE
    try:
        if path.exists():
            return ChatTemplate.from_json(json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: it cannot be read. Restore it, or choose another --workdir.") from None
    return own_template(data.codec())  # Of runs that are older than the file.


def chat_of_data(data: Data, codec: Codec) -> dict[str, Any] | None:
    """The chat template of data, or the one that came with their tokenizer; None for one that cannot be read."""
    made = data.chat()
    if made is not None:
        return made
    try:
        own = own_template(codec)
    except ConfigError:  # It matters to those alone who chat, and they are told.
        return None
    return None if own is None else own.to_json()


def _read(workdir: Path) -> dict[str, Any]:
    """The content of `codec.json`. Raises ConfigError when it cannot be read."""
    path = workdir / CODEC_FILE
    try:
        record = json.loads(path.read_bytes())
        assert isinstance(record["fingerprint"], str)
        assert all(type(token) is int and token >= 0 for token in record.get("opening", ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise ConfigError(f"{path}: it cannot be read. Restore it, or choose another --workdir.") from None
    return record


def _tokenizer(data: Data) -> Codec | None:
    """The tokenizer of data; None for what is not text, and where its file is missing."""
    try:
        return data.codec()
    except ConfigError:
        return None
