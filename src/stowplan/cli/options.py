"""Options and checks that several verbs share. A file that cannot be written is refused before the work."""

from argparse import ArgumentParser
from pathlib import Path

from stowplan import api
from stowplan.errors import BadUse

GRAPH_PLAN_OR_RUN = "a graph file, a plan (`plan -o`) or a run (`check -o`)"


def add_choices(parser: ArgumentParser) -> None:
    """Add the options for techniques, preference, kernels and arena."""
    known, further = (",".join(words) for words in (api.TECHNIQUES, api.ON_REQUEST))
    parser.add_argument(
        "--allow",
        type=_words,
        metavar="TECHNIQUES",
        help=f"techniques that the plan may use: {known} (default: these), {further} (only on request);"
        " tiles change gradients by rounding. Without --allow and --prefer, a plan of MODULE:FUNCTION that"
        " takes more than twice eager's time is refused",
    )
    parser.add_argument(
        "--prefer",
        choices=tuple(map(str, api.Prefer)),
        help="exactness (default): tiles only if nothing else fits; time: tiles wherever they are faster",
    )
    parser.add_argument(
        "--kernels",
        choices=tuple(map(str, api.Kernels)),
        default=str(api.Kernels.EAGER),
        help="eager (default): PyTorch's own, the same bits; compiled: inductor compiles groups of ops, once"
        " on a machine, where that is faster; gradients then differ by rounding",
    )
    parser.add_argument(
        "--arena",
        action="store_true",
        help="run the step in one storage, each tensor at an offset that the plan gives it: the budget limits"
        " this arena and what lies beside it, whatever the allocator does",
    )


def add_layouts(parser: ArgumentParser) -> None:
    """Add the option for the layouts of a file's ops."""
    parser.add_argument(
        "--layouts",
        choices=tuple(map(str, api.Layouts)),
        default=str(api.Layouts.RECORDED),
        help="for files with changes of layout, such as TensorFlow's: those of the file (default), or chosen"
        " so that the fewest bytes are copied, where ops have kernels for both layouts",
    )


def add_saved(parser: ArgumentParser) -> None:
    """Add the option for what backward keeps in Chainer's files."""
    parser.add_argument(
        "--saved",
        choices=("listed", "retain"),
        help="for Chainer files: backward keeps what its records list (default) or what they say to retain",
    )


def add_training(parser: ArgumentParser) -> None:
    """Add the option that derives the backward half of a file's graph."""
    parser.add_argument(
        "--training", action="store_true", help="for forward graphs such as ONNX: add the backward half"
    )


def add_iteration(parser: ArgumentParser) -> None:
    """Add the options that make a whole iteration of a step."""
    parser.add_argument("--optimizer", help=f"for whole iterations: {api.OPTIMIZER_HELP}")
    parser.add_argument(
        "--clip-norm", type=float, metavar="NORM", help="with --optimizer: clip gradients to this norm"
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="with --optimizer: backwards before each update (default 1)",
    )


def add_search_limits(parser: ArgumentParser) -> None:
    """Add the options that end a search early."""
    parser.add_argument(
        "--gap",
        type=float,
        default=api.DEFAULT_OPTIONS.gap,
        metavar="SHARE",
        help="end the search when the plan's time is at most this share above the lower bound (default"
        f" {api.DEFAULT_OPTIONS.gap}; 0 searches to the end)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="end the search after this time with the best plan so far, and say how far that may be from the"
        " best",
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def refuse_unwritable(path: str | None) -> None:
    """BadUse if the folder does not exist, or if the path is itself a folder."""
    if path is not None and Path(path).is_dir():
        raise BadUse(f"{path} cannot be written: it is a folder; add the name of a file")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise BadUse(f"{path} cannot be written: there is no folder {Path(path).absolute().parent}")


def write_output(path: str, text: str) -> None:
    """Write an output file."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as fault:
        raise BadUse(f"{path} cannot be written: {fault.strerror or fault}") from fault
