"""What a user sees of a command line with a mistake in it, run in this process."""

import re

import pytest

from jaxdl.train import main


def refusal(capsys, *args: str, code: int = 2, run=main) -> str:
    """The one message of `python -m jaxdl.train ARGS`, on one line, without the box that tyro draws around it.

    Fails unless the command ends with the exit code `code`, and with one message and no traceback on stderr.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run([str(one) for one in args])
    printed = capsys.readouterr().err
    assert end.value.code == code, printed
    assert "Traceback" not in printed
    assert printed.count("error:") <= 1, printed
    message = " ".join(re.sub("[\u2500-\u257f]", " ", printed).split())
    assert message, "it said nothing"
    return message
