"""The output of command lines with user errors, run in this process."""

import pytest

from jaxdl.train import main

MAX_LINES = 4
"""The most lines of one message."""


def refusal(capsys, *args: str, code: int = 2, run=main) -> str:
    """The one message of `python -m jaxdl.train ARGS`, with its line breaks made spaces.

    Fails unless the command ends with the exit code `code`, and with one short message and no traceback on stderr; a
    mistake of the user's, code 2, has nothing before `error: `.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run([str(one) for one in args])
    printed = capsys.readouterr().err
    assert end.value.code == code, printed
    assert "Traceback" not in printed
    assert "errors.pydantic.dev" not in printed, printed
    assert printed.count("error:") <= 1, printed
    assert "error: :" not in printed, printed
    assert len(printed.splitlines()) <= MAX_LINES, printed
    if code == 2:
        assert printed.startswith("error: "), printed
    message = " ".join(printed.split())
    assert message, "it said nothing"
    return message
