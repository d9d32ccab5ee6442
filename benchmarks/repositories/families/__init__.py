"""The entries, one module for each family of repositories."""

from importlib import import_module

from benchmarks.repositories.training import ENTRIES, Entry

_FAMILIES = ("language", "vision", "generative", "selfsupervised", "sound", "series")


def load() -> dict[str, Entry]:
    """All entries by name."""
    for family in _FAMILIES:
        import_module(f"{__name__}.{family}")
    return ENTRIES
