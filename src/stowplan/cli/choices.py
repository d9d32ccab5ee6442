"""The choices that every verb which plans leaves to its user."""

from argparse import ArgumentParser

from stowplan import api


def add_choices(parser: ArgumentParser) -> None:
    """What may cost time, and what counts for more."""
    known, further = (",".join(words) for words in (api.TECHNIQUES, api.ON_REQUEST))
    parser.add_argument(
        "--allow",
        type=_words,
        default=api.TECHNIQUES,
        metavar="TECHNIQUES",
        help=f"techniques that the plan may use: {known} (default: these), {further} (only on request);"
        " tiles change gradients by rounding",
    )
    parser.add_argument(
        "--prefer",
        choices=tuple(map(str, api.Prefer)),
        default=str(api.Prefer.EXACTNESS),
        help="exactness (default): tiles only if nothing else fits; time: tiles wherever they are faster",
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)
