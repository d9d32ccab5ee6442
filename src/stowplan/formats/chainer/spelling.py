"""How the graph spells what the file has no name for: gradients, masks, adjoints, op ids."""

GRADIENT = ".grad"
MASK = ".mask"
BACKWARD = ".backward"
"""Ends the id and the type of an adjoint, so that one type has one meaning in every table."""


def gradient_id(value: str) -> str:
    """The tensor that is the gradient of `value`."""
    return value + GRADIENT


def mask_id(value: str) -> str:
    """The tensor that says which elements of `value` a dropout kept."""
    return value + MASK


def link_of(parameter_name: str) -> str:
    """The link a parameter belongs to: "block/conv" of "/block/conv/W"."""
    return parameter_name.strip("/").rpartition("/")[0]
