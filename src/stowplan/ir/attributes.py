"""Attributes are JSON values that cannot change: what a file spelled as a list becomes a tuple."""

from stowplan.ir.graph import Attribute


def attribute_of(value: object) -> Attribute:
    """A decoded JSON value as an attribute: lists become tuples, at every depth."""
    if isinstance(value, list | tuple):
        return tuple(attribute_of(item) for item in value)
    if isinstance(value, dict):
        return {str(key): attribute_of(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not an attribute")


def object_without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object from its members (`object_pairs_hook`); a key that comes twice is a ValueError."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} comes twice")
        found[key] = value
    return found
