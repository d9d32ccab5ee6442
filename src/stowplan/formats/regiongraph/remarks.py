"""What the reader had to infer, repair or keep as it is, collected with the lines it is about."""

from dataclasses import dataclass, field

from stowplan.ir import Note, NoteKind


@dataclass(slots=True)
class Remarks:
    """Notes in the making, by line."""

    _notes: list[tuple[int, Note]] = field(default_factory=list)

    def repaired(self, line: int, what: str, read: str, became: str, why: str = "") -> None:
        """`what` was read as one thing and taken for another."""
        told = f"{what}: read {read!r}, became {became!r}" + (f" {why}" if why else "")
        self._add(NoteKind.REPAIRED, line, told)

    def inferred(self, line: int, what: str) -> None:
        """Not on the page, deduced."""
        self._add(NoteKind.INFERRED, line, what)

    def odd(self, line: int, what: str) -> None:
        """Strange, and kept or left aside."""
        self._add(NoteKind.ODD, line, what)

    def in_order(self) -> tuple[Note, ...]:
        """The notes from the top of the page to its end."""
        return tuple(note for _, note in sorted(self._notes, key=lambda entry: entry[0]))

    def _add(self, kind: NoteKind, line: int, what: str) -> None:
        self._notes.append((line, Note(kind, f"line {line}", what)))
