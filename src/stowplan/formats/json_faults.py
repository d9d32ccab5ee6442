"""What a decoder of JSON has against a file, as BadInput that names the place."""

import msgspec

from stowplan.errors import BadInput


def bad_input_of(fault: msgspec.DecodeError | UnicodeEncodeError | RecursionError) -> BadInput:
    """The same fault, told by its path in the file. A decoder bounds depth by RecursionError."""
    if isinstance(fault, RecursionError):
        return BadInput("nested too deeply to be a file of this format", where="$")
    if isinstance(fault, UnicodeEncodeError):
        return BadInput("holds text that is not Unicode", where="$")
    what, _, where = str(fault).partition(" - at `")
    return BadInput(what, where=where.rstrip("`") or "$")
