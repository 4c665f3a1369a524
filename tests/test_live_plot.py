"""The curves in the cell of a notebook: one picture, updated in place, for a small share of the time."""

import sys
from types import SimpleNamespace

import pytest

from jaxdl.report.notebook import EVERY_SEC, MAX_SHARE, LivePlot

COLUMNS = {"step": [1, 2], "train/loss": [1.0, 0.5]}


@pytest.fixture
def cell(monkeypatch):
    """A stand-in for the kernel: what is shown, and a clock that drawing moves by `took` seconds."""
    cell = SimpleNamespace(now=0.0, took=0.1, shown=[], updated=0, error=None)

    class Image:
        def __init__(self, data, **options):
            self.data, self.options = data, options

    def update(picture):
        if cell.error:
            raise cell.error
        cell.now += cell.took
        cell.updated += 1
        cell.shown[-1] = picture

    def display(picture, *, display_id):
        assert display_id
        cell.now += cell.took
        cell.shown.append(picture)
        return SimpleNamespace(update=update)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=Image, display=display))
    return cell


def live_plot(cell):
    return LivePlot(lambda: COLUMNS, objective="", note=print, clock=lambda: cell.now)


def test_one_picture_is_updated_in_place(cell):
    plot = live_plot(cell)
    for cell.now in (0.0, EVERY_SEC - 0.1):
        plot.update()
    assert not cell.shown, "a short run is drawn at its end alone"
    for cell.now in (EVERY_SEC, EVERY_SEC + 1, 2.1 * EVERY_SEC):
        plot.update()
    assert (len(cell.shown), cell.updated) == (1, 1)
    plot.update(last=True)
    assert (len(cell.shown), cell.updated) == (1, 2)
    assert cell.shown[0].data.startswith(b"\x89PNG")


def test_a_slow_drawing_is_made_less_often(cell):
    plot = live_plot(cell)
    cell.now, cell.took, spent = EVERY_SEC, 2.0, 0
    for _ in range(2000):
        before = len(cell.shown) + cell.updated
        plot.update()
        spent += 2.0 * (len(cell.shown) + cell.updated - before)
        cell.now += 0.1
    assert 3 <= len(cell.shown) + cell.updated <= 6
    assert spent / cell.now <= MAX_SHARE + 2.0 / cell.now


def test_a_display_that_fails_is_one_message_and_no_error(cell):
    notes = []
    plot = LivePlot(lambda: COLUMNS, objective="", note=notes.append, clock=lambda: cell.now)
    plot.update(last=True)
    cell.error = RuntimeError("no display")
    for _ in range(2):
        plot.update(last=True)
    assert notes == ["the curves cannot be shown in this notebook: RuntimeError: no display"]
