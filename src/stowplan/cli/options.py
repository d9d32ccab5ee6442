"""Options and checks that several verbs share. A file that cannot be written is refused before the work.

Options of a request are made from its dataclasses, and read back into them.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from stowplan import api
from stowplan.errors import BadUse

GRAPH_PLAN_OR_RUN = "a graph file, a plan (`plan -o`) or a run (`check -o`)"


def add_allow(parser: ArgumentParser) -> None:
    """Add the option for techniques."""
    known, further = (",".join(words) for words in (api.TECHNIQUES, api.ON_REQUEST))
    parser.add_argument(
        "--allow",
        type=_words,
        metavar="TECHNIQUES",
        help=f"techniques that the plan may use: {known} (default: these), {further} (only on request);"
        " tiles change gradients by rounding. Without --allow and --prefer, a plan of MODULE:FUNCTION that"
        " takes more than twice eager's time is refused",
    )


def add_options(parser: ArgumentParser, group: type, names: Sequence[str]) -> None:
    """Add options of a dataclass of the request, with their defaults and what they say of themselves."""
    by_name = {each.name: each for each in fields(group)}
    for name in names:
        each, kind = by_name[name], by_name[name].type
        told = {"help": each.metadata["help"], "default": each.default}
        words = _words_of(kind)
        if kind is bool:
            parser.add_argument(spelled(name), action="store_true", help=told["help"])
        elif words:
            parser.add_argument(spelled(name), choices=words, **told)
        else:
            number = float if float in (kind, *get_args(kind)) else int
            parser.add_argument(spelled(name), type=number, metavar=each.metadata["metavar"], **told)


def _words_of(kind: Any) -> tuple[str, ...]:
    """The words of a literal type, also of one that may be None."""
    inside = (kind, *get_args(kind))
    return tuple(word for each in inside if get_origin(each) is Literal for word in get_args(each))


def spelled(name: str) -> str:
    """An option as the command line writes it."""
    return f"--{name.replace('_', '-')}"


Group = TypeVar("Group")


def read_options(arguments: Namespace, group: type[Group], **more: Any) -> Group:
    """What was given of a dataclass's options, and its defaults for all else."""
    names = [each.name for each in fields(group) if each.init]  # type: ignore[arg-type]
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return group(**given | more)


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
    add_options(parser, api.Iteration, ("clip_norm", "accumulate"))


def read_iteration(arguments: Namespace) -> "api.Iteration | None":
    """The iteration that was asked for, if there is one."""
    if arguments.optimizer is not None:
        return read_options(arguments, api.Iteration)
    if (arguments.clip_norm, arguments.accumulate) != (None, 1):
        raise BadUse("--clip-norm and --accumulate are of an iteration: give --optimizer too")
    return None


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
