"""Finds faults of a rendered figure: texts that overlap, are cut off, or cover curves."""

import itertools

from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text


def drawn_by(monkeypatch, draw):
    """The matplotlib figures that `draw` saves; nothing is rasterized, which would take most of the time."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: found.append(figure))
        draw()
    assert found, "nothing was drawn"
    return found


def text_boxes(figure):
    """(text, its rectangle in pixels) of every visible text: titles, labels, ticks, legends, annotations."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    hidden = set()
    for axes in (one for panel in figure.axes for one in (panel, *panel.child_axes)):
        for axis in (axes.xaxis, axes.yaxis):
            shown = {id(tick) for tick in axis._update_ticks()}
            for tick in (*axis.majorTicks, *axis.minorTicks):
                if id(tick) not in shown:
                    hidden |= {id(tick.label1), id(tick.label2)}
    found = []
    for text in figure.findobj(Text):
        if not text.get_visible() or not text.get_text().strip() or id(text) in hidden:
            continue
        # The extent of an annotation includes its line.
        box = (Text if isinstance(text, Annotation) else type(text)).get_window_extent(text, renderer)
        if box.width > 0 and box.height > 0:
            found.append((text.get_text(), box))
    return found


def faults(figure):
    """The faults of a figure in words; empty if it is readable."""
    boxes, slack = text_boxes(figure), 1.0
    width, height = figure.get_size_inches() * figure.dpi
    found = [
        f"{text!r} leaves the canvas"
        for text, box in boxes
        if box.x0 < -slack or box.y0 < -slack or box.x1 > width + slack or box.y1 > height + slack
    ]
    for (text, one), (other, two) in itertools.combinations(boxes, 2):
        if min(one.x1, two.x1) - max(one.x0, two.x0) > slack and min(one.y1, two.y1) - max(one.y0, two.y0) > slack:
            found.append(f"{text!r} overlaps {other!r}")
    for axes in figure.axes:
        panel = axes.get_window_extent()
        for line in axes.lines:
            path = line.get_transform().transform_path(line.get_path()).cleaned(remove_nans=True)
            found += [
                f"{text!r} covers data"
                for text, box in boxes
                if panel.contains(*((box.min + box.max) / 2)) and path.intersects_bbox(box, filled=False)
            ]
    return found
