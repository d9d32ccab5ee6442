"""The way out: which formats can be written, and what each of them carries beside a graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stowplan.errors import BadUse
from stowplan.formats import chainer, graphtext, regiongraph, stow, tilelog
from stowplan.ir import Document

FACETS = ("profile", "allocation", "regions", "tiles")


@dataclass(frozen=True, slots=True)
class Writer:
    """How to write a format, the facets it has a place for, and the suffix that asks for it."""

    write: Callable[[Document], str]
    carries: tuple[str, ...] = ()
    suffix: str | None = None


def _chainer(document: Document) -> str:
    return chainer.write(document.graph)


WRITERS: Mapping[str, Writer] = {
    "stow": Writer(stow.write, FACETS, ".stow.json"),
    "text": Writer(graphtext.write, suffix=".stow.txt"),
    "chainer": Writer(_chainer),
    "regiongraph": Writer(regiongraph.write, ("regions",)),
    "tilelog": Writer(tilelog.write, ("tiles",)),
}


def format_for(path: Path) -> str:
    """The format that a file's name asks for."""
    for name, writer in WRITERS.items():
        if writer.suffix and path.name.endswith(writer.suffix):
            return name
    suffixes = " or ".join(writer.suffix for writer in WRITERS.values() if writer.suffix)
    raise BadUse(
        f"{path.name!r} does not say its format: end it in {suffixes}, or name one of {', '.join(WRITERS)}"
    )


def text_of(document: Document, to: str) -> str:
    """The document in a format; BadUse if the format has no place for something the document holds."""
    writer = WRITERS[to]
    lost = [name for name in FACETS if getattr(document, name) is not None and name not in writer.carries]
    if lost:
        raise BadUse(
            f"a {to} file has no place for the document's {' and '.join(lost)}; write stow, or the graph only"
        )
    return writer.write(document)
