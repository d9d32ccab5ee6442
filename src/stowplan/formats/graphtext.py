"""The text form of a graph as a file format."""

from stowplan.formats.checked import checked
from stowplan.ir import Document
from stowplan.ir.text import HEADER, format_graph, parse_graph

FORMAT = "text"


def recognise(text: str) -> bool:
    """Whether the text begins with the header."""
    return text[:200].lstrip().startswith(HEADER)


def read(text: str) -> Document:
    """The graph of a text."""
    return Document(FORMAT, checked(parse_graph(text), {}, otherwise="the graph"))


def write(document: Document) -> str:
    """The text of a document's graph."""
    return format_graph(document.graph)
