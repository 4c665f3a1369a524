"""Answers: pages and parts of them, which escape all texts; JSON that is sent again only when it has changed."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent
_HEADERS = {"Cache-Control": "private, no-cache"}


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": as_number, "count": as_count, "size": as_size, "iso": as_iso, "lasting": as_duration,
        "seconds": lambda at: int(at),
    }  # fmt: skip
    return environment


def render(template: str, **values: Any) -> str:
    """The text of a template."""
    return _environment().get_template(template).render(values)


def as_html(text: str, status: int = 200) -> Response:
    """A page."""
    return Response(text.encode(errors="backslashreplace"), status, _HEADERS, "text/html; charset=utf-8")


def etag_of(value: Any) -> str:
    """What stands for a value of JSON."""
    return f'"{hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:24]}"'


def as_json(request: Request, version: Any, make: Callable[[], Any]) -> Response:
    """What `make` returns as JSON; nothing but 304 if the client has what `version` stands for."""
    etag = etag_of(version)
    headers = {**_HEADERS, "ETag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(json.dumps(make(), allow_nan=False), 200, headers, "application/json")


def as_number(value: Any) -> str:
    """A number with four digits; other values as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def as_count(value: Any) -> str:
    """A count with separators."""
    return f"{value:,}" if isinstance(value, int) else ""


def as_size(value: Any) -> str:
    """Bytes in a unit that suits."""
    if not isinstance(value, int | float):
        return ""
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def as_iso(at: Any) -> str:
    """A time in seconds since 1970 as UTC in ISO 8601; empty for what is none."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def as_duration(seconds: Any) -> str:
    """`7 s`, `12 min`, `3.4 h`, `5 d`."""
    if not isinstance(seconds, int | float):
        return ""
    for size, name in ((60.0, "s"), (60.0, "min")):
        if seconds < size:
            return f"{max(0.0, seconds):.0f} {name}"
        seconds /= size
    return f"{seconds:.1f} h" if seconds < 48 else f"{seconds / 24:.0f} d"
