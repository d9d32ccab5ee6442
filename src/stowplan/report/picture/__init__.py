"""The memory curve as a picture for a paper: what is drawn, and its two spellings, SVG and PNG."""

from stowplan.report.page.subject import Subject
from stowplan.report.picture.memory import drawing_of
from stowplan.report.picture.png import png_of_drawing
from stowplan.report.picture.svg import svg_of_drawing


def svg_of(subject: Subject) -> str:
    """The memory curve of a subject as SVG; its text stays text."""
    return svg_of_drawing(drawing_of(subject))


def png_of(subject: Subject) -> bytes:
    """The same picture in pixels, as many as print needs."""
    return png_of_drawing(drawing_of(subject))
