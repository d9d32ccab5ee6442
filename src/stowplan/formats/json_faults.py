"""What a decoder of JSON has against a file, as BadInput that names the place."""

import msgspec

from stowplan.errors import BadInput


def bad_input_of(fault: msgspec.DecodeError | UnicodeEncodeError) -> BadInput:
    """The same fault, told by its path in the file."""
    if isinstance(fault, UnicodeEncodeError):
        return BadInput("holds text that is not Unicode", where="$")
    what, _, where = str(fault).partition(" - at `")
    return BadInput(what, where=where.rstrip("`") or "$")
