"""The printed output of hosts: complete lines after the host name, including progress bars and colours."""

import contextlib
import io
import threading
from pathlib import Path

import pytest

from jaxdl.platform.launch.output import DRAFT_SEC, MAX_LINE_BYTES, LineReader, Printer


def test_lines_are_made_of_any_pieces():
    """Every way to split the bytes gives the same lines, even within a character."""
    data = "one\ntwö\r\nthrée\n\nlast".encode()
    for cut in range(len(data)):
        reader = LineReader()
        assert [*reader.feed(data[:cut]), *reader.feed(data[cut:]), *reader.end()] == [
            "one",
            "twö",
            "thrée",
            "",
            "last",
        ]


def test_progress_bars_become_a_line_now_and_then():
    clock = [0.0]
    reader = LineReader(lambda: clock[0])
    shown = []
    for percent in range(101):
        clock[0] += DRAFT_SEC / 20
        shown += reader.feed(b"\r\x1b[K%d%%|###" % percent)
    shown += reader.feed(b"\n")
    assert shown == ["18%|###", "38%|###", "58%|###", "78%|###", "98%|###", "100%|###"]


def test_colours_are_kept_and_cursor_moves_are_not():
    reader = LineReader()
    assert reader.feed(b"\x1b[2A\x1b[32mgreen\x1b[0m\x1b[?25l\n") == ["\x1b[32mgreen\x1b[0m"]


def test_a_line_without_end_is_broken():
    reader = LineReader()
    lines = reader.feed(b"x" * (MAX_LINE_BYTES + 1))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES + 1]
    assert reader.end() == []


def test_lines_of_many_threads_stay_whole():
    stdout = io.StringIO()
    printer = Printer(["host0", "host1"], stdout, io.StringIO())

    def work(name):
        for number in range(200):
            printer.print(name, f"{name} {number}")

    threads = [threading.Thread(target=work, args=(f"host{index}",)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        own = [line for line in stdout.getvalue().splitlines() if line.startswith(f"host{index} ")]
        assert own == [f"host{index}    | host{index} {number}" for number in range(200)]


def test_gloo_is_heard_only_when_a_connection_is_missing():
    stdout = io.StringIO()
    printer = Printer(["host0"], stdout, io.StringIO())
    for begin in ("[Gloo] Rank 1", "[Gloo] Rank [Gloo] Rank 1", "1"):  # Two threads write at once.
        for count in (3, 2):
            line = f"{begin} is connected to {count} peer ranks. Expected number of connected peer ranks is : 3"
            printer.print("host0", line)
    assert stdout.getvalue().count("connected to 2 peer") == 3
    assert "connected to 3 peer" not in stdout.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_what_a_stream_does_not_take_stops_nobody():
    closed = []
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # To close it is refused, too.
        printer = Printer(["host0"], latin, full, lambda: closed.append(True))
        for _ in range(3):
            printer.print("host0", "an error", error=True)
        printer.print("host0", "loss \N{RIGHTWARDS ARROW} 1")
    assert latin.buffer.getvalue() == b"host0    | loss ? 1\n"
    assert not closed


def test_a_terminal_gets_colours_and_a_file_does_not(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, file = Terminal(), io.StringIO()
    printer = Printer(["host0"], terminal, file)
    printer.print("host0", "text")
    printer.print("host0", "text", error=True)
    assert "\x1b[" in terminal.getvalue()
    assert file.getvalue() == "host0    | text\n"
