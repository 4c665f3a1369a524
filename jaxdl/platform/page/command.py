"""What `python -m jaxdl.status --serve` does: checks where it may listen, and serves the page."""

from __future__ import annotations

import argparse
import importlib
import secrets
import socket
import sys
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.web.listening import address_of, bind, is_local, kept_signals, local_names, others_read, read_tokens
from jaxdl.platform.page.scan import check_given

TOKEN_VARIABLE = "JAXDL_STATUS_TOKEN"
"""The environment variable that may have the token."""
_BACKLOG, _MOST_CONNECTIONS = 512, 512
_DRAIN_SEC = 2


def check_extra() -> None:
    """Raises ConfigError when a package of the extra `serve` is missing."""
    for package in ("starlette", "uvicorn"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise ConfigError(
                f"--serve: it needs the package {package}, which is not installed. Install it with pip install "
                "'jaxdl[serve]'."
            ) from None


def choose_tokens(options: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """(the tokens, the one that was made here, if any). Raises ConfigError for what is no token."""
    tokens = read_tokens(options.token_file, TOKEN_VARIABLE)
    if options.token_file is not None and others_read(options.token_file):
        print(f"warning: --token-file {options.token_file}: other users may read it (chmod 600)", file=sys.stderr)
    if tokens or not options.token:
        return tokens, ""
    made = secrets.token_urlsafe(24)
    return (made,), made


def make_server(options: argparse.Namespace, bound: socket.socket, tokens: tuple[str, ...]) -> Any:
    """A `uvicorn.Server` of the page for a socket, which has not started."""
    from jaxdl.core.web.connections import make_server as make_web_server
    from jaxdl.platform.page.app import make_app

    local = is_local(bound)
    app = make_app(
        options.workdirs,
        tokens=tokens,
        everyone_looks=local or options.without_token,
        hosts=local_names(options.host) if local else None,
        metrics=options.metric,
        look_ahead=True,
    )
    return make_web_server(app, most_connections=_MOST_CONNECTIONS, backlog=_BACKLOG, drain_sec=_DRAIN_SEC)


def serve(options: argparse.Namespace) -> None:
    """Serves the page until SIGTERM or Ctrl-C. Raises ConfigError for what cannot be."""
    check_extra()
    check_given(options.workdirs)
    tokens, made = choose_tokens(options)
    with bind(options.host, options.port) as bound:
        if not is_local(bound) and not tokens and not options.without_token:
            raise ConfigError(
                f"--host {options.host}: other machines reach it, and no token protects it. Give --token, which makes "
                f"one, or --token-file FILE, or set {TOKEN_VARIABLE}; --without-token lets everyone look."
            )
        server = make_server(options, bound, tokens)
        bound.listen(_BACKLOG)  # Who reads the next line may connect at once.
        where = f"{address_of(bound)}/{f'?token={made}' if made else ''}"
        print(f"the page is at {where}", flush=True)
        rights = "read-only for who has no token" if tokens else "read-only"
        print(f"{rights}; Ctrl-C ends it", file=sys.stderr)
        with kept_signals():
            server.run(sockets=[bound])
