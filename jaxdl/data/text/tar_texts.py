"""Texts in tar files, as WebDataset writes them: `0001.txt`, or a field of `0001.json`."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from jaxdl.core.config import ConfigError
from jaxdl.data.lines import LARGEST_DOCUMENT, Span, open_lines, text_in
from jaxdl.data.records import LeftOut
from jaxdl.data.remote import is_hidden
from jaxdl.data.text.documents import Format, Reading

_TEXTS = (".txt", ".text", ".md")
_JSON = ".json"


class TarTexts(Format):
    """A tar file of texts; a document is a member of it, in its order. A file is one span."""

    suffixes = (".tar",)

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        """One, of the whole file."""
        size = path.stat().st_size
        return [Span(str(path), 0, size, size)]

    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        """The texts of its members; those of other kinds are named on stderr."""
        left_out = LeftOut()
        try:
            # A stream of members: one that is compressed cannot be read otherwise.
            with open_lines(Path(span.path)) as file, tarfile.open(fileobj=file, mode="r|") as tar:
                for member in tar:
                    if not member.isreg() or is_hidden(member.name):
                        continue
                    if member.size > LARGEST_DOCUMENT:
                        raise ConfigError(f"{span.path}: {member.name} has {member.size / 1e9:,.1f} GB. Cut it.")
                    name = member.name.lower()
                    if not name.endswith((*_TEXTS, _JSON)):
                        left_out.add("members that are not text", member.name)
                        continue
                    content = tar.extractfile(member)
                    assert content is not None
                    yield _text(content.read(), f"{span.path}: {member.name}", reading, name.endswith(_JSON))
        except tarfile.TarError as error:
            raise ConfigError(f"{span.path}: not a whole tar file ({error}). Copy or write it again.") from None
        if left_out:
            print(f"{Path(span.path).name}: not read are {left_out}", file=sys.stderr, flush=True)


def _text(content: bytes, where: str, reading: Reading, is_json: bool) -> str | None:
    try:
        text = content.decode("utf-8-sig")
        return text_in(json.loads(text), reading.column, where, "Set column.") if is_json else text
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 ({error.reason}). Correct it, or leave it out.") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not JSON ({error}). Correct it, or leave it out.") from None
