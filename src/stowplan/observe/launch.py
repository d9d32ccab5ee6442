"""Starting a script as the interpreter would, in a process that observes itself.

The interpreter itself runs the script: `__main__`, `sys.argv`, `sys.path`, `-m`, standard input and the exit
code need no imitation. The environment brings the observer along. This process waits, hands signals on, and
reads the records that observed processes left, also of one that was killed.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import which

from stowplan.errors import BadUse
from stowplan.plan.options import Search, told

VARIABLE = "STOWPLAN_OBSERVE"
BOOT = str(Path(__file__).with_name("boot"))
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_FROM_KERNEL = 0x80  # si_code of what a terminal sends: the script has it too


@dataclass(frozen=True, slots=True)
class BudgetedRun:
    """What a script is run with: the budget of all its tensors, and how its modules are planned.

    `allow` are the techniques, as for `fit`. With `strict`, what is refused ends the run.
    """

    budget_bytes: int
    allow: str | None = None
    strict: bool = field(
        default=False,
        metadata=told(
            "end the run before an iteration that cannot be planned, or would exceed the budget; without it,"
            " such a module runs as it is, which is said"
        ),
    )
    search: Search = field(default_factory=Search)


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What is asked of the script's process.

    `folder` takes the records. After `iterations` the script ends; None lets it go on. `limit_bytes` is the
    most that tensors may take. `path` is PYTHONPATH as the user has it, None if it is not set. With a
    `budgeted` run, its modules are planned; else the script is observed.
    """

    folder: str
    iterations: int | None = None
    limit_bytes: int | None = None
    path: str | None = None
    budgeted: BudgetedRun | None = None

    def as_text(self) -> str:
        """For the environment of the script's process."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: str) -> "LaunchSettings":
        """What `as_text` wrote."""
        found = json.loads(text)
        if (run := found["budgeted"]) is not None:
            found["budgeted"] = BudgetedRun(**{**run, "search": Search(**run["search"])})
        return LaunchSettings(**found)


def script_name() -> str:
    """The script that this process runs, as the command line names it."""
    words = sys.orig_argv[1:]
    if "-m" in words:
        return words[words.index("-m") + 1]
    return sys.argv[0] if sys.argv else ""


def command_line(words: Sequence[str]) -> list[str]:
    """The interpreter with the user's command: a script, `-m MODULE`, `-c CODE` or `-`, and its arguments."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise BadUse("a script is observed through PYTHONPATH and site, which -E, -I and -S switch off")
    if not words:
        raise BadUse("name a script, or -m and a module, after the options")
    first, *others = words
    if first in ("-m", "-c"):
        if not others:
            raise BadUse(f"{first} needs a {'module' if first == '-m' else 'line of code'}")
    elif first != "-" and not Path(first).exists():
        first = _program(first)
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, first, *others]


def _program(name: str) -> str:
    """A command on PATH that is written in Python, such as torchrun."""
    found = None if os.sep in name else which(name)
    if found is not None:
        with open(found, "rb") as file:
            first = file.readline(200)
        if first.startswith(b"#!") and b"python" in first:
            return found
        raise BadUse(f"{found} is no Python program, so nothing can be observed in it")
    raise BadUse(f"there is no script {name} here")


def run_observed(command: Sequence[str], settings: LaunchSettings) -> int:
    """Run the command to its end; its exit code, or the negative number of the signal that ended it."""
    path = os.pathsep.join(part for part in (BOOT, settings.path) if part)
    environment = {**os.environ, "PYTHONPATH": path, VARIABLE: settings.as_text()}
    if not hasattr(signal, "sigwaitinfo"):  # Linux has it, macOS has not: there Ctrl-C reaches both
        return _waited(subprocess.Popen(command, env=environment))
    return _forwarding(command, environment)


def _waited(process: "subprocess.Popen[bytes]") -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _forwarding(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Wait for the end of the process, or for a signal that it did not get itself."""
    wanted = {signal.Signals[name] for name in _FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*wanted, signal.SIGCHLD})
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
        while (code := process.poll()) is None:
            news = signal.sigwaitinfo({*wanted, signal.SIGCHLD})
            if news.si_signo != signal.SIGCHLD and news.si_code != _FROM_KERNEL:
                process.send_signal(news.si_signo)
        return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_as(code: int) -> int:
    """The exit code to end with, after the script ended so: by the same signal, if it was one."""
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script has left one already, if any
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    return code
