"""Runs cases of the zoo, each in a process of its own with a limit of processor time.

A case is planned twice, at a roomy and at a tight budget. Each planned model and an eager twin then make two
optimizer steps on batches that were not planned for. Losses, parameters and buffers are compared to the bit,
and the memory that the allocator tells of is compared with the budget. A case that `fit` refuses is tried
again in another process with `torch.compile(backend="stowplan")`.
"""

import copy
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

import stowplan
from benchmarks.zoo.cases import Batch, Case, Training, package
from stowplan import Search
from stowplan.errors import BudgetTooSmall, StowplanError
from stowplan.run.backend.compile import plans_for
from stowplan.run.measure.measure import measure

ROOMY = 2**40
_TIGHT = 0.7  # of the peak without a plan
_MOVES = 10
_SEEDS = (1, 2)
_COMPILING = 60  # seconds of processor time for a model that fit refuses, at one budget
_TOO_SMALL = "refused: needs "
_OUT_OF_TIME = 24  # an exit status
_MOST_IMPORTED = {  # modules that a package imports when they are first needed, which would be in each fork
    "transformers": ("transformers.models.llama.modeling_llama", "transformers.models.clip.modeling_clip"),
    "peft": ("transformers.models.llama.modeling_llama",),
    "diffusers": ("diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders.autoencoder_kl"),
    "monai": ("monai.networks.nets", "monai.losses"),
    "torchvision": ("torchvision.models.segmentation", "torchvision.models.detection"),
    "torch_geometric": ("torch_geometric.nn",),
}


@dataclass(frozen=True, slots=True)
class Result:
    """`outcome` is fitted, refused, wrong, over budget, failed in eager or out of time; `cause` says why.

    A model whose tight budget was not tried is "fitted, roomy". `compiled` says what became of a refused
    model under `torch.compile`.
    """

    package: str
    name: str
    outcome: str
    cause: str = ""
    eager_bytes: int = 0
    tight_bytes: int = 0
    measured_bytes: int = 0
    seconds: float = 0.0
    compiled: str = ""


def tried(case: Case, *, roomy_only: bool = False) -> Result:
    """One case, in this process."""
    started = time.process_time()
    outcome, cause, sizes = "fitted", "", (0, 0, 0)
    try:
        torch.manual_seed(0)
        model = Training(case.make(), case.loss).train()
        twin = copy.deepcopy(model)
        torch.manual_seed(0)
        twin(**case.batches(0)).backward()
    except Exception as error:
        return Result(case.package, case.name, "failed in eager", _words(error))
    try:
        if roomy_only:
            outcome, cause = _compared_roomy(model, case)
        else:
            outcome, cause, sizes = _compared(model, case)
    except StowplanError as error:
        outcome, cause = "refused", _words(error)
    except Exception as error:
        outcome, cause = "wrong", f"raises {_words(error)}"
    return Result(case.package, case.name, outcome, cause, *sizes, time.process_time() - started)


def _compared_roomy(model: nn.Module, case: Case) -> tuple[str, str]:
    """Without a search and without measuring: a third of the time."""
    expected = _trained(copy.deepcopy(model), case)
    different = _first_difference(expected, _trained(_fitted(model, case.batches(0), ROOMY), case))
    return ("wrong", different) if different else ("fitted, roomy", "")


def _compared(model: nn.Module, case: Case) -> tuple[str, str, tuple[int, int, int]]:
    expected = _trained(copy.deepcopy(model), case)
    roomy = _fitted(model, case.batches(0), ROOMY)
    eager_bytes = stowplan.plans_of(roomy)[0].projected_peak_bytes
    tight_bytes = int(eager_bytes * _TIGHT)
    try:
        tight = _fitted(model, case.batches(0), tight_bytes)
    except BudgetTooSmall as refusal:
        tight_bytes = refusal.minimum_bytes + refusal.minimum_bytes // 50
        tight = _fitted(model, case.batches(0), tight_bytes)
    measured_bytes = 0
    for fitted, budget in ((tight, tight_bytes), (roomy, ROOMY)):
        peaks: list[int] = []
        try:
            found = _trained(fitted, case, peaks)
        except BudgetTooSmall as refusal:  # another batch, or another draw, takes another way through forward
            budget = tight_bytes = refusal.minimum_bytes + refusal.minimum_bytes // 50
            peaks.clear()
            found = _trained(_fitted(model, case.batches(0), budget), case, peaks)
        sizes = eager_bytes, tight_bytes, measured_bytes or max(peaks)
        measured_bytes = sizes[2]
        if different := _first_difference(expected, found):
            return "wrong", different, sizes
        if max(peaks) > budget:
            return "over budget", f"{max(peaks):,} of {budget:,} bytes", sizes
    plans = (*stowplan.plans_of(tight), *stowplan.plans_of(roomy))
    unsure = next((str(p.against_eager.note) for p in plans if p.against_eager and p.against_eager.note), "")
    return "fitted", unsure, sizes


def _fitted(model: nn.Module, batch: Batch, budget: int) -> nn.Module:
    torch.manual_seed(0)
    return stowplan.fit(
        copy.deepcopy(model), (), batch, budget=budget, allow=["recompute"], search=Search(moves=_MOVES)
    )


def _trained(model: nn.Module, case: Case, peaks: list[int] | None = None) -> list[tuple[str, Tensor]]:
    """Two optimizer steps: the losses, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found: list[tuple[str, Tensor]] = []
    for seed in _SEEDS:
        batch = case.batches(seed)

        def step(batch: Batch = batch) -> Tensor:
            loss: Tensor = model(**batch)
            torch.autograd.backward(loss)
            return loss.detach()

        torch.manual_seed(seed)
        if peaks is None:
            loss = step()
        else:
            vars(model)["_fitting"].step_for(model, (), batch)  # a new answer is planned before measuring
            torch.manual_seed(seed)
            standing = [*model.parameters(), *model.buffers(), *_tensors(batch)]
            measurement = measure(step, before=standing)
            loss = measurement.result
            peaks.append(measurement.measured_peak_bytes)
        optimizer.step()
        optimizer.zero_grad()
        found.append((f"loss of step {seed}", loss))
    found += ((name, tensor.detach()) for name, tensor in model.named_parameters())
    return [*found, *((name, tensor) for name, tensor in model.named_buffers())]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def compiled(case: Case, budget: int) -> str:
    """What becomes of a case under torch.compile, at a budget or, if that is 0, at 0.9 of eager's peak."""
    torch.manual_seed(0)
    model = Training(case.make(), case.loss).train()
    expected = _trained(copy.deepcopy(model), case)
    batch, twin = case.batches(0), copy.deepcopy(model)
    torch.manual_seed(0)
    standing = [*twin.parameters(), *twin.buffers(), *_tensors(batch)]
    eager = measure(lambda: twin(**batch).backward(), before=standing)
    budget = budget or int(eager.measured_peak_bytes * 0.9)
    options: dict[str, object] = {"budget": budget, "moves": _MOVES}
    try:
        different = _first_difference(expected, _trained(_compiling(model, options), case))
    except BudgetTooSmall as refusal:
        return f"{_TOO_SMALL}{refusal.minimum_bytes} bytes: {_words(refusal)}"
    except StowplanError as error:
        return f"refused: {_words(error)}"
    except Exception as error:
        return f"raises {_words(error)}"
    if different:
        return f"wrong: {different}"
    found = f"equal, {len(plans)} plans" if (plans := plans_for(options)) else "nothing planned"
    share, seconds = budget / eager.measured_peak_bytes, time.process_time()
    return f"{found} at {share:.1f} of eager's peak, {seconds:.0f} s of processor time"


def _compiled_apart(case: Case) -> str:
    """Each budget in a process of its own: a later graph may need more than the first refusal says."""
    budget, words = 0, ""
    for further in (1.02, 1.1, 2.0, 0.0):
        words = _apart(partial(compiled, case, budget), _COMPILING)
        if not words.startswith(_TOO_SMALL):
            break
        budget = int(int(words.removeprefix(_TOO_SMALL).split()[0]) * further)
    return words


def _compiling(model: nn.Module, options: dict[str, object]) -> nn.Module:
    made = copy.deepcopy(model)
    made.compile(backend="stowplan", options=options)
    return made


def _first_difference(expected: list[tuple[str, Tensor]], found: list[tuple[str, Tensor]]) -> str:
    for (name, one), (_, other) in zip(expected, found, strict=True):
        same = torch.equal(one, other) or (
            torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
        if not same:
            return f"{name} differs from eager by {(one - other).abs().max().item():.1e}"
    return ""


def _words(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    name = "" if isinstance(error, StowplanError) else f"{type(error).__name__}: "
    return f"{name}{text}"[:700]


def run_all(
    cases: Iterable[Case], seconds: int, report: Callable[[Result], None], *, roomy_only: bool = False
) -> None:
    """Each case in a fork of this process, which has imported the package of the cases once."""
    for name, group in groupby(cases, key=lambda case: case.package):
        try:
            for module in (name, *_MOST_IMPORTED.get(name, ())):
                package(module)
        except ImportError as error:
            for case in group:
                report(Result(name, case.name, "failed in eager", _words(error)))
            continue
        for case in group:
            report(_result(case, seconds, roomy_only=roomy_only))


def _result(case: Case, seconds: int, *, roomy_only: bool) -> Result:
    text = _apart(lambda: json.dumps(asdict(tried(case, roomy_only=roomy_only))), seconds)
    if not text.startswith("{"):
        outcome = "out of time" if text.startswith("more than") else "wrong"
        return Result(case.package, case.name, outcome, text)
    result = Result(**json.loads(text))
    if result.outcome == "refused":
        return replace(result, compiled=_compiled_apart(case))
    return result


def _apart(run: Callable[[], str], seconds: int) -> str:
    """What `run` returns in a fork of this process, or how the fork ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        Thread(target=_end_after, args=(seconds,), daemon=True).start()
        with os.fdopen(writer, "w") as answer:
            answer.write(run())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        return text
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OUT_OF_TIME:
        return f"more than {seconds} s of processor time, or ten times that of waiting"
    return f"ended with status {status}"


def _end_after(seconds: int) -> None:
    """End this process when it has used so much processor time, or waits for ten times as long."""
    latest = time.monotonic() + 10 * seconds
    while time.process_time() < seconds and time.monotonic() < latest:
        time.sleep(0.5)
    os._exit(_OUT_OF_TIME)


def read(path: Path) -> list[Result]:
    """Results, the latest of each case."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = (Result(**json.loads(line)) for line in lines)
    return list({(result.package, result.name): result for result in found}.values())
