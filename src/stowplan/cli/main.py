"""The command `stowplan`: finds the verb, runs it, and turns refusals into exit codes.

0 done, 1 the answer is no, 2 bad use or bad input, 3 an internal error: a fault of stowplan itself, with the
command to report. A verb's module is imported only when it is called.
"""

import json
import os
import re
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from stowplan import __version__
from stowplan.errors import BadUse, BudgetTooSmall, StowplanError, nearest
from stowplan.plan.sockets import is_installed

INTERNAL_ERROR = 3
TRACEBACK = "STOWPLAN_TRACEBACK"
_SHOWN = 300  # characters of an internal error's own message

# Each verb is a module of this package with `add_arguments(parser)` and `run(arguments) -> exit code`.
VERBS = {
    "demo": "train a U-Net and a GPT under 60 percent of their memory, beside eager PyTorch",
    "inspect": "say what is in a file or a training step, and where its memory goes",
    "plan": "choose what to keep, recompute, offload or tile, to fit a step into a budget in bytes",
    "check": "run a model eagerly and by a plan, and compare losses, gradients, memory and time",
    "explain": "say why a plan keeps or recomputes a tensor, and what the other choice would cost",
    "report": "draw a graph, a plan or a run as a page, a trace, a picture or a table",
    "compare": "say what changed between two plans or runs, and what it bought",
    "fit-largest": "find the largest batch, resolution or sequence that fits a budget, and its price",
    "simulate": "project a step over a mesh of workers: bytes, peak, seconds, scaling",
    "doctor": "say what is installed, what this machine has, and what is usable here",
    "gpu-check": "measure on this device, in two minutes, what stowplan promises, as two files to send",
    "convert": "write what is in a file in another format",
    "watch": "run a training script as it is, and say where the memory of an iteration goes",
    "run": "run a training script within a budget in bytes, no line of it changed",
}
IN_FRONT = ("watch", "run")
"""Verbs that stand in front of a command, whose words are not theirs."""


if not is_installed("mesh"):
    del VERBS["simulate"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code is returned, not raised."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    arguments = Namespace()
    _print_any_character()
    try:
        arguments = _read(words)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except StowplanError as error:
        if isinstance(error, BudgetTooSmall) and getattr(arguments, "json", False):
            _print_refusal(error)
        _complain(f"stowplan: {error}")
        return error.exit_code
    except MemoryError:
        _complain("stowplan: this machine has not enough memory to answer that")
        return BadUse.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the flush at exit complain
        return 0
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if error.name != "torch":
            _report_internal_error(error, words)
            return INTERNAL_ERROR
        _complain(
            f"stowplan: this needs PyTorch, which {sys.executable} does not have: pip install"
            " 'stowplan[torch]'; inspect, plan, explain, report, simulate and convert read files without it"
        )
        return BadUse.exit_code
    except Exception as error:
        _report_internal_error(error, words)
        return INTERNAL_ERROR
    return code


def _report_internal_error(error: Exception, words: Sequence[str]) -> None:
    """The error, its place, and the command that repeats it: all a report needs except the files."""
    import shlex
    from platform import python_version
    from traceback import extract_tb, format_exception

    if os.environ.get(TRACEBACK):
        _complain("".join(format_exception(error)))
    frame = extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {error}"
    message = message if len(message) <= _SHOWN else f"{message[:_SHOWN]}..."
    message = (
        f"stowplan: internal error at {frame.filename}:{frame.lineno}: {message}\n"
        "This is a fault of stowplan, not of your input. Please report it with the files that are read and\n"
        f"  {shlex.join(['stowplan', *words])}\n"
        f"stowplan {__version__}, Python {python_version()}; {TRACEBACK}=1 before it shows the traceback."
    )
    _complain(message)


def _complain(message: str) -> None:
    """Print to standard error, without control characters: a message may quote a file."""
    from stowplan.units import printable

    print(printable(message), file=sys.stderr)


def _print_refusal(refusal: BudgetTooSmall) -> None:
    """With --json, a budget that is too small is an answer like any other."""
    from stowplan.report.plan_json import refusal_json

    print(json.dumps(refusal_json(refusal), indent=2))


def _open_closed_streams() -> None:
    """A process may start without standard streams (`<&-`): no file may take their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _print_any_character() -> None:
    """Names from files may have characters that the terminal's encoding lacks: print ? for them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


class _Parser(ArgumentParser):
    """A command line that is misspelt ends as every other refusal does: in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Refuse, with the nearest of the choices that the message lists."""
        found = re.fullmatch(r"(?:argument (.+?): )?invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        if found is not None:
            name, word, choices = found[1], found[2], found[3].replace("'", "")
            where = "" if name in (None, "VERB") else f"{name}: "
            message = f"{where}no {word!r}{nearest(word, choices.split(', '))}; there is {choices}"
        elif found := re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message):
            message = f"{found[1]} is {found[3]}, which is no {'whole ' * (found[2] == 'int')}number"
        elif found := re.fullmatch(r"argument (\S+): expected one argument", message):
            message = f"{found[1]} is given no value"
        raise BadUse(f"{message}; `{self.prog} -h` explains all")


def _read(words: Sequence[str]) -> Namespace:
    command: Sequence[str] = ()
    if words and words[0] in IN_FRONT:
        words, command = _before_command(words)
    parser, verb = _parsers(words)
    arguments, unknown = parser.parse_known_args(words, Namespace(command=list(command)))
    if unknown:
        near = nearest(unknown[0].partition("=")[0], re.findall(r"--[\w-]+", verb.format_usage()))
        raise BadUse(f"unrecognized arguments: {' '.join(unknown)}{near}; `{verb.prog} -h` explains all")
    return arguments


def _before_command(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words of the verb, and those of the command, which a script, -m, -c, - or -- begins."""
    options = _parsers(words[:1])[1]._actions
    with_value = {name for option in options if option.nargs is None for name in option.option_strings}
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "-m", "-c", "--"):
        at += 2 if words[at] in with_value else 1
    command = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
    return words[:at], command


def parser_of(verb: str) -> ArgumentParser:
    """The parser of a verb with its arguments; without a verb, that of the command."""
    return _parsers((verb,))[1]


class _Print(Action):
    """An option that prints a text made from all parsers, and ends the command."""

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        """Print what is named as the option is."""
        print(getattr(import_module("stowplan.cli.shell"), self.dest)(), end="")
        parser.exit()


def _parsers(words: Sequence[str]) -> tuple[ArgumentParser, ArgumentParser]:
    """All verbs by name and summary; only the one that is called, the second, brings its arguments."""
    parser = _Parser(
        prog="stowplan",
        description="Train a PyTorch model within a memory budget in bytes.",
        epilog="For example: stowplan plan train:step --budget 6GiB -o step.plan. Exit codes: 0 done, 1 the"
        " answer is no (the step does not fit, gradients differ), 2 bad use or bad input, 3 internal error.",
    )
    parser.add_argument("--version", action="version", version=f"stowplan {__version__}")
    parser.add_argument(
        "--completion",
        dest="bash_completion",
        choices=("bash",),
        action=_Print,
        help="print a script that completes commands in this shell",
    )
    parser.add_argument("--man", dest="manual", nargs=0, action=_Print, help="print a page for man")
    verbs, called_parser = parser.add_subparsers(metavar="VERB", required=True), parser
    called = next((word for word in words if not word.startswith("-")), None)
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.")
        if name == called:
            module = import_module(f"stowplan.cli.{name.replace('-', '_')}")
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
            called_parser = verb
    return parser, called_parser
