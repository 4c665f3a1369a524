"""The tokenizer of a run: recorded in its workdir when it begins, and compared wherever its text is encoded later.

The config names the file alone, which another may replace: its tokens would mean nothing to the network.
"""

from __future__ import annotations

import json
from pathlib import Path

from jaxdl.cluster.agree import of_first_process
from jaxdl.config import ConfigError
from jaxdl.data import Codec, Data
from jaxdl.files import CODEC_FILE
from jaxdl.report import replace_file


def keep_codec(workdir: Path, data: Data) -> None:
    """Records in `codec.json` which tokenizer the data of a run have, unless that is there. Bytes have none.

    Raises ConfigError, on all processes, when it cannot be written.
    """

    def keep() -> bytes:
        path, codec = workdir / CODEC_FILE, _tokenizer(data)
        try:
            if codec is not None and not path.exists():
                content = json.dumps({"kind": codec.kind, "fingerprint": codec.fingerprint()}, indent=2)
                replace_file(path, (content + "\n").encode())
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
    path = workdir / CODEC_FILE
    if codec.is_bytes or not path.exists():
        return
    try:
        recorded = json.loads(path.read_bytes())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: it cannot be read. Restore it, or choose another --workdir.") from None
    if codec.fingerprint() != recorded:
        raise ConfigError(
            f"tokenizer {codec.tokenizer}: it is not the one that the network in {workdir} was trained with: its "
            "content differs, so its tokens may mean other texts. Put the old file back."
        )


def _tokenizer(data: Data) -> Codec | None:
    """The tokenizer of data; None for bytes, for what is not text, and where its file is missing."""
    try:
        codec = data.codec()
    except ConfigError:
        return None
    return None if codec.is_bytes else codec
