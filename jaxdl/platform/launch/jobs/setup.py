"""`--setup`: a user's lines of shell, which run before the command of a job on each node, in the shell it replaces."""

from __future__ import annotations

import re
import shutil
import subprocess
import unicodedata

GUARD = (
    'trap "code=\\$?; echo The command of the job was not started: its shell ended before. >&2; '
    'exit \\$((code ? code : 2))" EXIT\n'
)
"""The first line of a shell with a user's lines in it: if it ends before `exec`, it does not end with 0. `exec` itself
runs no trap, and a signal ends the shell as it would without one."""

_HEREDOC = re.compile(r"(?<!<)<<(-?)\s*(?:'([^']+)'|\"([^\"]+)\"|\\?([^\s;&|<>()'\"]+))")
_EXEC = re.compile(r"(?:^|[;&|({]|\b(?:then|do|else)\b)\s*exec\s+(?!\d*[<>]|&|\{\w+\}[<>])(\S+)")


def check_setup(text: str | None) -> str | None:
    """The lines, each ended by a newline, without blank ones around them; None if there are none.

    Raises ValueError for what is no whole piece of bash: it would take the lines after it for its own.
    """
    lines = "" if text is None else text.replace("\r\n", "\n").strip()
    if not lines:
        return None
    if broken := unwritable(lines.replace("\n", "").replace("\t", "")):
        raise ValueError(f"the character {broken!r} cannot be written into a job file.")
    if (said := _syntax_error(lines)) is not None:
        raise ValueError(f"bash cannot read it: {said}. Give whole commands, on as many lines as they need.")
    for line in _commands(lines):
        if (replaced := _EXEC.search(line)) is not None:
            raise ValueError(
                f"exec {replaced[1]} replaces the shell, so the command of the job would never begin. Leave out exec; "
                "redirections of the shell, such as exec > FILE, may stay."
            )
    # A backslash at the end would join the line after it.
    return lines + ("\n\n" if lines.endswith("\\") else "\n")


def unwritable(text: str) -> str:
    """The first character that no shell or YAML file can hold: of control, or not Unicode; "" if there is none."""
    return next((character for character in text if unicodedata.category(character) in ("Cc", "Cs")), "")


def _syntax_error(text: str) -> str | None:
    """What bash says of it without running it; None if that is nothing, or there is no bash on this machine."""
    bash = shutil.which("bash")
    if bash is None:
        return None
    # Patterns such as !(a|b) are read with extglob only, which the lines may set.
    checked = subprocess.run(
        [bash, "-O", "extglob", "-n"], input=text + "\n", env={"LC_ALL": "C"}, capture_output=True, encoding="utf-8"
    )
    said = checked.stderr.strip().splitlines()
    return re.sub(r"^\S*bash: (warning: )?", "", said[0]) if said else None


def _commands(text: str) -> list[str]:
    """The lines without comments of their own and without the texts of here-documents."""
    lines, ends = [], []
    for line in text.split("\n"):
        if ends:
            dash, end = ends[0]
            if (line.lstrip("\t") if dash else line) == end:
                ends.pop(0)
            continue
        if not line.lstrip().startswith("#"):
            lines.append(line)
            ends += [(dash, a or b or c) for dash, a, b, c in _HEREDOC.findall(line)]
    return lines
