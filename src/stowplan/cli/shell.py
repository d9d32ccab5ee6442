"""The command line for a shell and for `man`: both are written from the parsers of the verbs."""

import re
from argparse import Action, ArgumentParser
from collections.abc import Sequence

from stowplan import __version__
from stowplan.cli.main import VERBS, parser_of
from stowplan.units import printable


def bash_completion() -> str:
    """A script that completes verbs, options and the words that an option takes; elsewhere names of files."""
    cases = "\n".join(_case(verb, _options_of(parser_of(verb))) for verb in VERBS)
    return f"""# Completion of stowplan {__version__} for bash: eval "$(stowplan --completion bash)"
_stowplan() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} verb= words= each
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [[ $each != -* ]]; then verb=$each; break; fi
    done
    case $verb in
        "") words="{" ".join((*VERBS, "--help", "--version"))}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _stowplan stowplan
"""


def _case(verb: str, options: Sequence[Action]) -> str:
    """What may follow a verb: the choices of the option before, or an option if one was begun."""
    choices = "".join(
        f'{"|".join(option.option_strings)}) words="{" ".join(map(str, option.choices))}" ;; '
        for option in options
        if option.choices
    )
    flags = " ".join(flag for option in options for flag in option.option_strings)
    begun = f'if [[ $word == -* ]]; then words="{flags}"; fi'
    return f"        {verb}) case $before in {choices}*) {begun} ;; esac ;;"


def manual() -> str:
    """The page for `man`, in the words of the help."""
    whole = parser_of("")
    verbs = "".join(_verb(verb, parser_of(verb)) for verb in VERBS)
    return f""".TH STOWPLAN 1 "" "stowplan {__version__}" "User Commands"
.SH NAME
stowplan \\- {_roff(str(whole.description).rstrip("."))}
.SH SYNOPSIS
.B stowplan
.I VERB
[\\fIoption\\fR ...]
.SH DESCRIPTION
{_roff(str(whole.epilog))}
.SH VERBS
{verbs}"""


def _verb(name: str, parser: ArgumentParser) -> str:
    words = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    parts = [f".SS {_roff(name)}", _roff(str(parser.description)), ".PP", _roff(words)]
    for action in (*_positionals_of(parser), *_options_of(parser)):
        term, value = ", ".join(action.option_strings), str(action.metavar or action.dest.upper())
        term = f"\\fB{_roff(term)}\\fR" if term else f"\\fI{_roff(value)}\\fR"
        takes_value = action.option_strings and action.nargs != 0
        parts += [".TP", f"{term} {_roff(value)}" if takes_value else term, _roff(_help_of(action))]
    return "\n".join((*parts, *([".PP", _roff(parser.epilog)] if parser.epilog else ()), ""))


def _help_of(action: Action) -> str:
    values = {**vars(action), "prog": "stowplan"}
    return str(action.help or "") % {name: value for name, value in values.items() if value is not None}


# argparse has no public list of what a parser takes.
def _options_of(parser: ArgumentParser) -> list[Action]:
    return [action for action in parser._actions if action.option_strings]


def _positionals_of(parser: ArgumentParser) -> list[Action]:
    return [action for action in parser._actions if not action.option_strings]


def _roff(text: str) -> str:
    """Words that troff prints as they are."""
    escaped = printable(text).replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)
