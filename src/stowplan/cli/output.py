"""Files that verbs write: what cannot be written is refused before the work, not after it."""

from pathlib import Path

from stowplan.errors import BadUse


def refuse_unwritable(path: str | None) -> None:
    """BadUse if there is no such folder."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise BadUse(f"{path} cannot be written: there is no folder {Path(path).absolute().parent}")


def write_output(path: str, text: str) -> None:
    """Write a file that was asked for."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as fault:
        raise BadUse(f"{path} cannot be written: {fault.strerror or fault}") from fault
