"""Attributes as strict JSON, which has no infinities: those become `{"$float": "inf"}`.

A mapping's own keys that begin with $ get a second one, so nothing is mistaken for that.
"""

from collections.abc import Mapping
from math import isfinite

from stowplan.errors import BadInput
from stowplan.ir import Attribute

_FLOAT = "$float"
_NON_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def to_json(attribute: Attribute) -> object:
    """The JSON value of an attribute."""
    if isinstance(attribute, tuple):
        return [to_json(item) for item in attribute]
    if isinstance(attribute, Mapping):
        return {f"${key}" if key[:1] == "$" else key: to_json(item) for key, item in attribute.items()}
    if isinstance(attribute, float) and not isfinite(attribute):
        return {_FLOAT: str(attribute)}
    return attribute


def from_json(value: object) -> Attribute:
    """The attribute of a JSON value."""
    if isinstance(value, list):
        return tuple(map(from_json, value))
    if isinstance(value, dict):
        return _non_finite(value[_FLOAT]) if value.keys() == {_FLOAT} else _mapping(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} does not come out of a JSON file")


def _mapping(value: dict[str, object]) -> dict[str, Attribute]:
    return {_own_key(key): from_json(item) for key, item in value.items()}


def _own_key(key: str) -> str:
    if key[:1] == "$" and key[:2] != "$$":
        raise BadInput(f"an attribute's key {key!r} begins with one $", where="$.ops")
    return key[1:] if key[:1] == "$" else key


def _non_finite(name: object) -> float:
    if not isinstance(name, str) or name not in _NON_FINITE:
        raise BadInput(f"an attribute's {_FLOAT} is one of {', '.join(_NON_FINITE)}", where="$.ops")
    return _NON_FINITE[name]
