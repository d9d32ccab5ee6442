"""The beginning of an observed process: the environment as the user has it, and a wait for torch.

Nothing is imported here that the script may not have imported itself, for a script sets threads and
allocators in its environment before it imports torch.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stowplan.observe.awaiting import after_import
from stowplan.observe.launch import VARIABLE, LaunchSettings
from stowplan.observe.record import RunRecord, WatchRecord

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_LAUNCHING = ("torchrun", "accelerate")


def begin() -> None:
    """Observe this process, unless it only starts others that are to be observed."""
    text = os.environ.get(VARIABLE)
    if text is None or is_launcher(sys.orig_argv):
        return
    settings = LaunchSettings.of_text(text)
    del os.environ[VARIABLE]  # what the script starts is not observed
    if settings.path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = settings.path

    def observe() -> None:
        try:
            if settings.budgeted is not None:
                from stowplan.observe import budgeted

                budgeted.begin(settings, settings.budgeted)
            else:
                from stowplan.observe import observer

                observer.begin(settings)
        except Exception as error:
            record = WatchRecord if settings.budgeted is None else RunRecord
            record(script=sys.argv[0], told=f"this could not begin: {error!r}").write(settings.folder)

    after_import("torch", observe)


def is_launcher(command: Sequence[str]) -> bool:
    """Whether this command line of Python starts the workers of a training run."""
    words = list(command[1:])
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1] in _LAUNCHERS
    script = next((word for word in words if not word.startswith("-")), "")
    return Path(script).name in _LAUNCHING
