"""Checks that readers share: a legal graph, JSON that decodes, and the digest of a file's content."""

from collections.abc import Mapping
from hashlib import sha256

import msgspec

from stowplan.errors import BadInput
from stowplan.ir import Graph
from stowplan.ir.graph import RULES


def checked(graph: Graph, where: Mapping[str, str], otherwise: str) -> Graph:
    """`graph` itself if it is legal. `where` gives by op id the place of an op in the file."""
    for rule in RULES:
        for fault in rule(graph):
            op = None if fault.op is None else graph.ops[fault.op].id
            raise BadInput(fault.what, where=where.get(op or "", otherwise))
    return graph


def digest_of(content: bytes) -> str:
    """What a file states of its own content, so that a damaged one is known."""
    return f"sha256:{sha256(content).hexdigest()}"


def bad_input_of(fault: msgspec.DecodeError | UnicodeEncodeError | RecursionError) -> BadInput:
    """The same fault, with its path in the file. A decoder limits depth by RecursionError."""
    if isinstance(fault, RecursionError):
        return BadInput("nested too deeply to be a file of this format", where="$")
    if isinstance(fault, UnicodeEncodeError):
        return BadInput("holds text that is not Unicode", where="$")
    what, _, where = str(fault).partition(" - at `")
    if "truncated" in what:
        what = "ends in the middle: the file was not written to its end"
    return BadInput(what, where=where.rstrip("`") or "$")
