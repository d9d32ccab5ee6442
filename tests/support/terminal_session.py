"""A session of a user: every command, and a `fit` whose capture takes long, in one process.

    python -m tests.support.terminal_session FOUND.json [--log] [--notebook] NAME...

It runs where `train.py` of `tests.support.terminal_session.TRAIN` lies, and writes what ended otherwise than
it should.
"""

import json
import logging
import random
import sys
import traceback
from pathlib import Path
from typing import Any, cast

TRAIN = """
import time
import torch
from torch import nn


class Slow(nn.Module):
    def __init__(self, forward_seconds):
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 1)
        self.forward_seconds = forward_seconds

    def forward(self, x):
        time.sleep(self.forward_seconds)
        return self.last(self.first(x).relu()).square().mean()


class Deep(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def step(batch: int = 64):
    torch.manual_seed(0)
    return Slow(0.0), (torch.randn(batch, 64),)


def slow_step():
    time.sleep(3)
    return step()


def deep_step():
    return Deep(250), (torch.randn(16, 16),)
"""
CAPTURE_SECONDS = 2.6
FILE = str(Path(__file__).parents[2] / "examples/data/unet_step.txt")

# In this order: some read what others wrote.
COMMANDS = {
    "doctor": "doctor",
    "inspect": f"inspect {FILE}",
    "inspect-step": "inspect train:slow_step --measure --optimizer adamw",
    "plan": f"plan {FILE} --saved retain --budget 4GiB --gap 0.2 -o file.plan.json",
    "plan-step": "plan train:slow_step --budget 400KiB --frontier -o step.plan.json",
    "check": "check train:slow_step --budget 400KiB -o run.json",
    "explain": "explain step.plan.json",
    "explain-tensor": "explain step.plan.json relu",
    "report": "report run.json -o run.html",
    "compare": "compare step.plan.json run.json",
    "convert": f"convert {FILE} unet.stow.json",
    "fit-largest": "fit-largest train:step --budget 1MiB --most 128",
    "simulate": "simulate train:step --mesh data=2",
    "gpu-check": "gpu-check --device cpu --time-limit 60 --networks gpt",
    "demo": "demo gpt --no-open",
    "long-search": "plan train:deep_step --budget 600KiB --allow recompute --gap 0 --time-limit 8",
    "long-capture": "inspect train:deep_step --no-probe",
}
FIT = "fit"


def main() -> None:
    """Run what the command line names; all if it names nothing."""
    found, *words = sys.argv[1:]
    names = [word for word in words if not word.startswith("-")] or [FIT, *COMMANDS]
    sys.path.insert(0, "")
    if "--log" in words:
        logging.basicConfig(level=logging.INFO)
    faults: dict[str, str] = {}
    run = _in_notebook if "--notebook" in words else _fault_of
    for name in names:
        if fault := run(name):
            faults[name] = fault
    Path(found).write_text(json.dumps(faults))


def _fault_of(name: str) -> str:
    try:
        if name == FIT:
            return _fit_slowly()
        from stowplan.cli.main import main as command

        code = command(COMMANDS[name].split())
    except (Exception, SystemExit):
        return traceback.format_exc()
    return f"exit code {code}" if code else ""


def _fit_slowly() -> str:
    """A fit in which forward takes long; it may not move the user's generators."""
    import torch
    from train import Slow  # type: ignore[import-not-found]

    import stowplan

    model, x = Slow(CAPTURE_SECONDS), torch.randn(64, 64)
    before = random.getstate(), torch.get_rng_state().tolist()
    fitted = stowplan.fit(model, (x,), budget="400KiB")
    moved = before != (random.getstate(), torch.get_rng_state().tolist())
    model.forward_seconds = fitted.forward_seconds = 0.0
    return "generators were moved" if moved else ""


def _in_notebook(name: str) -> str:
    """The same in a cell of IPython's shell, whose outputs can be updated as in a notebook."""
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    shell: Any = InteractiveShell.instance()
    shell.display_pub = publisher = cast(Any, CapturingDisplayPublisher)(shell=shell)
    shell.user_ns["run"] = lambda: _fault_of(name)
    result = shell.run_cell("fault = run()")
    result.raise_error()
    outputs = publisher.outputs
    if (outputs and not _replaced(outputs)) or (name == FIT and not outputs):
        return f"no output that is updated, and empty in the end: {outputs}"
    fault: str = shell.user_ns["fault"]
    return fault


def _replaced(outputs: list[dict[str, dict[str, str]]]) -> bool:
    """Whether all are updates of outputs that are left empty."""
    texts = {output["transient"]["display_id"]: output["data"]["text/plain"] for output in outputs}
    return len(texts) < len(outputs) and not any(texts.values())


if __name__ == "__main__":
    main()
