"""Files of our own: JSON in a frame that names its format and version and carries a digest of the content."""

from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

import msgspec

from stowplan.errors import BadInput
from stowplan.formats.checked import bad_input_of

Content = TypeVar("Content")


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The digest is taken over the bytes of the content as they stand."""

    format: str
    version: int
    digest: str
    content: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Seal:
    """The first fields of all files of one kind."""

    format: str
    version: int

    def recognise(self, text: str) -> bool:
        """Whether a file opens as this kind does."""
        return text[:200].lstrip().startswith(f'{{"format":"{self.format}"')

    def close(self, content: object) -> str:
        """The file of a content."""
        body = msgspec.json.encode(content)
        frame = _Frame(self.format, self.version, _digest(body), msgspec.Raw(body))
        return msgspec.json.encode(frame).decode()

    def open(self, text: str, kind: type[Content]) -> Content:
        """The content of a file; BadInput if it is damaged or of another kind or version."""
        try:
            frame = msgspec.json.decode(text, type=_Frame)
            self._check(frame)
            return msgspec.json.decode(frame.content, type=kind)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as fault:
            raise bad_input_of(fault) from fault

    def _check(self, frame: _Frame) -> None:
        if (frame.format, frame.version) != (self.format, self.version):
            found = f"{frame.format!r} version {frame.version}"
            raise BadInput(f"{found}, not {self.format!r} version {self.version}", where="$")
        if _digest(bytes(frame.content)) != frame.digest:
            raise BadInput(
                "the content has another digest: the file was changed or damaged", where="$.digest"
            )


def _digest(body: bytes) -> str:
    return f"sha256:{sha256(body).hexdigest()}"
