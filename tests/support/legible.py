"""What an editor would return a figure for, read from the figure itself."""

import re
from collections.abc import Iterator
from itertools import combinations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

FAR = 0.1  # of an axis: a label farther from its point seems to name something else
INDEX = re.compile(r"(attention |output of )?(layer|head|dimension|index|kind|checkpoint)\b")
TOUCHING = 1.0  # pixels that boxes may share, since they are a little larger than their letters


def faults(figure: Figure) -> list[str]:
    """Texts that leave the canvas or cover each other, labels far from their points, index axes with half ticks.

    Panels with nothing in them are faults too.
    """
    figure.draw_without_rendering()
    shown = [(text, text.get_window_extent()) for text in texts(figure)]
    canvas = figure.bbox.padded(TOUCHING)
    faults = [
        f"{text.get_text()!r} leaves the canvas"
        for text, box in shown
        if not (canvas.x0 <= box.x0 and box.x1 <= canvas.x1 and canvas.y0 <= box.y0 and box.y1 <= canvas.y1)
    ]
    faults += [
        f"{first.get_text()!r} covers {second.get_text()!r}"
        for (first, a), (second, b) in combinations(shown, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > TOUCHING and min(a.y1, b.y1) - max(a.y0, b.y0) > TOUCHING
    ]
    faults += [f"{text.get_text()!r} is far from its point" for text, _ in shown if distance(text) > FAR]
    for axes in figure.axes:
        faults += half_ticks(figure, axes)
        if axes.axison and not axes.has_data() and not any(text.get_text() for text in axes.texts):
            faults.append("an empty panel")
    return faults


def texts(artist: Artist) -> Iterator[Text]:
    """Everything that is written in an artist: no ticks beyond the ends of their axis."""
    for part in artist.get_children():
        if not part.get_visible():
            continue
        if isinstance(part, Axis):
            if part.axes.axison:
                yield from (text for text in (part.label, part.offsetText, *tick_labels(part)) if text.get_text())
        elif isinstance(part, Text):
            if part.get_text().strip():
                yield part
        else:
            yield from texts(part)


def tick_labels(axis: Axis) -> Iterator[Text]:
    """The labels of an axis that are drawn."""
    along = axis.get_transform().transform  # onto a linear scale
    low, high = sorted(along(np.asarray(axis.get_view_interval(), float)))
    slack = 1e-6 * (high - low)
    for which in ("major", "minor"):
        ticks = axis.get_major_ticks() if which == "major" else axis.get_minor_ticks()
        places = axis.get_majorticklocs() if which == "major" else axis.get_minorticklocs()
        for tick, place in zip(ticks, places, strict=False):
            label = tick.label2 if tick.label2.get_visible() else tick.label1
            if low - slack <= along(np.array([place]))[0] <= high + slack and label.get_visible() and label.get_text():
                yield label


def distance(text: Text) -> float:
    """From a label's box to its point, as a share of the axis; 0 for a text without a point."""
    if not isinstance(text, Annotation) or text.axes is None or text.xycoords != "data":
        return 0.0
    point, box = text.axes.transData.transform(text.xy), text.get_window_extent()
    beyond = np.maximum(0, np.maximum((box.x0, box.y0) - point, point - (box.x1, box.y1)))
    return float((beyond / (text.axes.bbox.width, text.axes.bbox.height)).max())


def half_ticks(figure: Figure, axes: Axes) -> Iterator[str]:
    """Ticks between the whole numbers of an axis of layers, heads, dimensions or the like."""
    for axis, name, over in (
        (axes.xaxis, "x", figure.get_supxlabel()),
        (axes.yaxis, "y", figure.get_supylabel()),
    ):
        same = getattr(axes, f"get_shared_{name}_axes")().get_siblings(axes)
        label = next(filter(None, (getattr(sibling, f"get_{name}label")() for sibling in same)), over)
        if INDEX.match(label):
            for text in (tick.get_text() for tick in tick_labels(axis)):
                if re.fullmatch(r"[−-]?\d*\.\d*[1-9]\d*", text):
                    yield f"{label!r} has a tick at {text}"
