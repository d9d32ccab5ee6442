"""`python -m tests.hollow_card.accuracy`: what is projected for cards, held to PyTorch's own requests.

The rows go to `docs/accuracy.jsonl`, and `docs/accuracy.md` is made of them: a run goes on where one ended.
Each row is a step that was projected from tensors without data before anything of it was on a card, and then
ran on the hollow card as eager PyTorch. Copies and kernels of large tensors are left out there, so a step may
be larger than this machine: what PyTorch's allocator is asked for does not depend on them.
"""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from stowplan.plan.allocator.settings import AllocatorSettings
from stowplan.plan.cards import Card, card_named, workspace_requests_on
from stowplan.run.measure.eager_requests import requests_of_eager
from stowplan.run.project import ProjectedStep, project_step
from stowplan.run.target import Target
from tests.hollow_card import Card as Described
from tests.hollow_card import settings_for
from tests.hollow_card.__main__ import environment, libraries_for
from tests.support.nets import NETS, Example

ITERATIONS = 3
_PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
_ROWS = _PAGE.with_suffix(".jsonl")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LARGE_LLAMA = {
    "batch": 1,
    "sequence": 2048,
    "vocabulary": 32000,
    "dim": 4096,
    "layers": 32,
    "heads": 32,
    "hidden": 11008,
}


@dataclass(frozen=True, slots=True)
class Step:
    """A net of `tests/support/nets`, with settings that differ from those of its size."""

    net: str
    size: str = "real"
    dtype: str = "float32"
    settings: Mapping[str, int] | None = None

    def build(self) -> Example:
        """On the meta device."""
        size = "real" if self.size == "6B" else self.size
        net, settings = NETS[self.net], self.settings or {}
        return net.build(size, device="meta", dtype=_DTYPES[self.dtype], **settings)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one step on one card, and how many requests of an iteration are not as projected."""

    card: str
    net: str
    size: str
    dtype: str
    projected_requested: int
    requested: int
    projected_reserved: int
    reserved: int
    requests: int
    requests_elsewhere: int
    commit: str

    @property
    def step(self) -> tuple[str, str, str, str]:
        """What it is a row of."""
        return self.card, self.net, self.size, self.dtype

    @property
    def requested_error(self) -> float:
        return self.projected_requested / self.requested - 1

    @property
    def reserved_error(self) -> float:
        return self.projected_reserved / self.reserved - 1


_OF_ALL = tuple(NETS)
_NARROW = ("gpt", "llama", "vit", "hf_gpt2", "hf_llama", "hf_vit", "hf_t5", "lstm", "moe", "ssm")
_ON_OTHERS = ("gpt", "llama", "vit", "unet", "resnet50", "moe")
STEPS: Mapping[str, Sequence[Step]] = {
    "a100-80gb": [
        Step("hf_llama", "6B", "bfloat16", _LARGE_LLAMA),
        *(Step(net, dtype="bfloat16") for net in _NARROW),
        *(Step(net, "tiny") for net in _OF_ALL),
        *(Step(net) for net in _OF_ALL),
    ],
    "t4": [Step(net) for net in _ON_OTHERS],
    "rtx-4090": [Step(net) for net in _ON_OTHERS],
}


def placed(model: nn.Module, args: Iterable[Tensor], device: str) -> Example:
    """The same on a device, without contents; what was one tensor stays one."""
    moved = dict[Tensor, Tensor]()

    def there(tensor: Tensor) -> Tensor:
        if tensor not in moved:
            made = torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)
            with torch.no_grad():
                made.zero_()
            moved[tensor] = (
                nn.Parameter(made, made.requires_grad) if isinstance(tensor, nn.Parameter) else made
            )
        return moved[tensor]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = there(tensor)  # type: ignore[assignment]
    return Example(model, tuple(map(there, args)))


def projected_requests(step: ProjectedStep) -> list[int]:
    """What an iteration asks for: bytes to allocate, or to free with a minus."""
    workspaces, sizes = workspace_requests_on(step.graph, step.card), dict[int, int]()
    found = list[int]()
    for block, nbytes in requests_of_eager(step.captured, workspaces, step.lasting_bytes).iteration:
        found.append(nbytes or -sizes[block])
        sizes[block] = nbytes
    return _in_any_order(found)


def requests_on_card(iteration: Callable[[], object]) -> list[int]:
    """What PyTorch's allocator is asked for, as it recorded it."""
    iteration()  # libraries keep their workspaces from the first one on
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
    iteration()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    sizes, found = dict[int, int](), list[int]()
    for event in events:
        if event["action"] == "alloc":
            found.append(event["size"])
            sizes[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            found.append(-sizes.pop(event["addr"], event["size"]))
    return _in_any_order(found)


def _in_any_order(requests: Iterable[int]) -> list[int]:
    """Frees that follow each other in order of size: free blocks are the same in any order."""
    runs = groupby(requests, key=lambda nbytes: nbytes < 0)
    return [nbytes for is_free, run in runs for nbytes in (sorted(run) if is_free else run)]


def row_of(step: Step, card: Card) -> Row:
    """Projected first, and then run."""
    model, args = step.build()
    projected = project_step(Target(model, args), card)
    heap = projected.without_a_plan(AllocatorSettings())
    assert heap is not None
    expected = projected_requests(projected)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    there = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    model, args = placed(model, args, "cuda")

    def iteration() -> None:
        model(*args).backward()
        model.zero_grad(set_to_none=True)

    for _ in range(ITERATIONS):
        iteration()
    stats = torch.cuda.memory_stats()
    requested, reserved = (
        stats[f"{name}_bytes.all.peak"] - there[f"{name}_bytes.all.current"]
        for name in ("requested", "reserved")
    )
    found = requests_on_card(iteration)
    figures = heap.figures
    return Row(
        card.id,
        step.net,
        step.size,
        step.dtype,
        figures.requested_peak_bytes,
        requested,
        figures.reserved_peak_bytes,
        reserved,
        len(found),
        _differing(expected, found),
        _commit(),
    )


def _differing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many requests are left between the common beginning and the common end."""
    shorter = min(len(one), len(other))
    begin = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    rest = shorter - begin
    end = next((place for place in range(rest) if one[-1 - place] != other[-1 - place]), rest)
    return max(len(one), len(other)) - begin - end


def main(arguments: Sequence[str]) -> int:
    """With the name of a card, its missing rows as lines of JSON; without, all cards and the page."""
    there = {row.step for row in rows_there()}
    if arguments:
        torch.empty(1, device="cuda")  # PyTorch counts from the first allocation on
        card = card_named(arguments[0])
        for step in STEPS[card.id]:
            if (card.id, step.net, step.size, step.dtype) not in there:
                print(json.dumps(asdict(row_of(step, card))), flush=True)
        return 0
    python = environment()
    libraries = libraries_for(python)
    for name in STEPS:
        card = card_named(name)
        described = Described(
            capability=str(card.capability), multiprocessors=card.multiprocessors, untouched="64KiB"
        )
        words = [str(python), "-m", "tests.hollow_card.accuracy", name]
        with _ROWS.open("a", encoding="utf-8") as file:
            subprocess.run(words, env=settings_for(described, libraries), stdout=file, check=True)
    _PAGE.write_text("\n".join(page(rows_there())) + "\n", encoding="utf-8")
    return 0


def rows_there() -> list[Row]:
    """Those of earlier runs."""
    lines = _ROWS.read_text(encoding="utf-8").splitlines() if _ROWS.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def _commit() -> str:
    """The last that changed `src`; with a plus if it has changes of its own."""
    source = ["--", str(_PAGE.parents[1] / "src")]
    last, own = (
        subprocess.run(["git", *words, *source], capture_output=True, text=True, cwd=_PAGE.parent).stdout
        for words in (["log", "-1", "--format=%h"], ["status", "--porcelain"])
    )
    return last.strip() + ("+" if own else "")


_ABOUT = """\
# How far are projections for a card right?

Made by `make accuracy`. Each step was projected from tensors without data, and then ran as eager PyTorch 2.14
on the [hollow card](devices.md): PyTorch's CUDA build with its host code and its allocator, without a card.
Requested bytes are what tensors and kernels ask the allocator for; reserved bytes are what it takes from the
card. Both are peaks over three iterations of forward and backward, with parameters and cuBLAS workspaces.
Nothing here ran on a GPU.
"""

_NOT_COVERED = """\
## What is not covered

- Times. Nothing here is timed.
- Kernels that cuDNN chooses: the hollow card gives a convolution no workspace. On a card it may take much.
- Optimizers, autocast and gradient scalers: eager's peak with them is not on this page.
- Planned steps: the tests of `tests/hollow_card` hold their requested bytes to what PyTorch counts.
- Models that came to the card in another way. Here the tensors came in the order of the modules. A model
  that was built on the card, or changed its dtype there, leaves free blocks, and its reserved bytes differ:
  by -10 to +9 % in five steps that were tried.
- cuDNN's attention at capabilities 9.0 and 10.0, cuDNN's recurrent layers, several cards, other versions of
  PyTorch.
"""

_HEAD = (
    "card",
    "step",
    "size",
    "dtype",
    "requested, projected",
    "requested",
    "error",
    "reserved, projected",
    "reserved",
    "error",
    "requests",
    "differ",
    "commit of src",
)


def page(rows: Sequence[Row]) -> Iterator[str]:
    """In Markdown."""
    yield _ABOUT
    yield f"Of {len(rows)} steps:"
    yield ""
    yield "| | equal to the byte | largest below | largest above | median of absolute errors |"
    yield "|---|---|---|---|---|"
    for name, errors in (
        ("requested", [row.requested_error for row in rows]),
        ("reserved", [row.reserved_error for row in rows]),
    ):
        exact, middle = sum(error == 0 for error in errors), median(map(abs, errors))
        least, most = min(0.0, *errors), max(0.0, *errors)
        yield f"| {name} | {exact} of {len(rows)} | {least:.2%} | {most:.2%} | {middle:.2%} |"
    same = sum(not row.requests_elsewhere for row in rows)
    yield ""
    yield f"On {same} of {len(rows)} steps, every request and every free of an iteration comes as projected,"
    yield "in size and order (frees that follow each other in any order). The column `differ` counts the"
    yield "requests from the first to the last that do not."
    yield ""
    yield f"| {' | '.join(_HEAD)} |"
    yield "|---" * len(_HEAD) + "|"
    yield from map(_line, rows)
    yield ""
    yield _NOT_COVERED.rstrip()


def _line(row: Row) -> str:
    numbers = (
        f"{row.projected_requested:,}",
        f"{row.requested:,}",
        f"{row.requested_error:.2%}",
        f"{row.projected_reserved:,}",
        f"{row.reserved:,}",
        f"{row.reserved_error:.2%}",
        f"{row.requests:,}",
        f"{row.requests_elsewhere:,}",
    )
    return f"| {' | '.join((*row.step, *numbers, row.commit))} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
