"""A reader of bytes as one of text, a character for each byte: damage is done to both in the same way."""

from stowplan.formats.door import BinaryReader
from stowplan.ir import Document


class AsText:
    """Takes texts of Latin-1; what that has no byte for becomes a question mark."""

    def __init__(self, reader: BinaryReader) -> None:
        self.FORMAT, self._reader = reader.FORMAT, reader

    def recognise(self, text: str) -> bool:
        """As the reader does."""
        return self._reader.recognise(bytes_of(text))

    def read(self, text: str) -> Document:
        """As the reader does."""
        return self._reader.read(bytes_of(text))


def bytes_of(text: str) -> bytes:
    """The bytes that a text of Latin-1 stands for."""
    return text.encode("latin-1", errors="replace")
