"""From blocks to a record: the peak of one iteration, what grows, and what can be had without a plan."""

import gc
import sys
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from stowplan.observe.blocks import (
    PHASES,
    STEP,
    BlockOrigin,
    BlockSpan,
    LiveBlock,
    alive_at,
    described,
    most_by_phase,
    peak_of,
    places_of,
)
from stowplan.observe.memory import is_users_file
from stowplan.observe.record import (
    ACTIVATIONS,
    GRADIENTS,
    KERNELS,
    LASTING,
    OTHER,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    Alive,
    Failure,
    PeakShare,
    Remedy,
)
from stowplan.run.instances import instances_of
from stowplan.torch_private import gradient_of, pytree

if TYPE_CHECKING:
    from stowplan.observe.observer import Observer

_MOST_PLACES = 40
_WORTH = 0.01  # of the peak: less is not worth a word
_MOST_ASKED = 3  # tensors of which it is asked who keeps them


def describe(observer: "Observer") -> None:
    """Fill the record from what was seen."""
    record, loop, blocks = observer.record, observer.loop, observer.memory.blocks
    record.segments = [" ".join(segment) for segment in loop.segments]
    if observer.memory.is_partial:
        record.notes.append("what kernels take for a while is not counted here")
    if not record.period or not blocks.all:
        return
    period, ends = record.period, loop.ends
    record.loop = observer.loop_text()
    record.first = len(ends) - 2 * period + 1
    begin, middle, end = ends[-2 * period - 1], ends[-period - 1], ends[-1]
    for parameter in observer.parameters():
        observer.memory.note(parameter, PARAMETERS)
    idle = _idle_calls(observer, middle)
    blocks.classify(idle.__contains__)
    blocks.relabel(observer.call_phases[call] for call in idle)
    record.peaks = [peak_of(blocks.spans(*window))[0] for window in ((begin, middle), (middle, end))]
    _, at = peak_of(blocks.spans(middle, end))
    record.peak = _short(alive_at(blocks, at))
    phases = most_by_phase(blocks, middle, end)
    record.phases = [PeakShare(name, phases[name]) for name in PHASES if name in phases]
    spans = list(blocks.spans(middle, end))
    _describe_growth(observer, begin, middle, end)
    peak_bytes = record.peaks[-1]
    findings = [
        *_late_gradients(observer, spans, middle),
        *_step_temporaries(observer, spans),
        *_idle_graphs(observer, spans, idle),
    ]
    record.findings += [finding for finding in findings if finding.nbytes >= _WORTH * peak_bytes]


def _short(alive: Alive) -> Alive:
    return replace(alive, places=alive.places[:_MOST_PLACES])


def _describe_growth(observer: "Observer", begin: int, middle: int, end: int) -> None:
    """What was allocated in the first iteration and is alive after the second one."""
    record, blocks = observer.record, observer.memory.blocks
    alive = [sum(span.nbytes for span in blocks.spans(clock, clock)) for clock in (middle, end)]
    record.growth_bytes = alive[1] - alive[0]
    if record.growth_bytes <= 0:
        return
    kept = [
        block
        for block in blocks.all
        if begin < block.born <= middle and block.died > end and block.kind not in (*LASTING, OTHER)
    ]
    record.growth = places_of(kept)[:_MOST_PLACES]
    nbytes = sum(block.nbytes for block in kept)
    if nbytes >= _WORTH * record.peaks[-1]:
        first = record.growth[0]
        holder = _holder_of(observer, kept)
        record.findings.append(
            Remedy(
                "each iteration leaves tensors behind" + (f" in {holder}" if holder else ""),
                f"{first.file}:{first.line}" if first.file else first.module,
                "keep .detach() or .item() of them, or only the last",
                nbytes,
            )
        )


def _holder_of(observer: "Observer", kept: Collection[LiveBlock]) -> str:
    """The list or dict that has one of these tensors, by its name where it has one in a module."""
    wanted = set(map(id, kept))
    tensors = instances_of([Tensor])
    found = [
        tensor
        for tensor in tensors
        if (block := observer.memory.block_of(tensor)) is not None and id(block) in wanted
    ]
    for number in range(min(len(found), _MOST_ASKED)):
        for holder in gc.get_referrers(found[number]):
            if type(holder) in (list, dict, set, deque) and holder is not tensors and holder is not found:
                kind = type(holder).__name__
                name = _name_of(holder)
                return f"`{name}`, a {kind} of {len(holder)}" if name else f"a {kind} of {len(holder)}"
    return ""


def _name_of(holder: object) -> str:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_users_file(file):
            for name, value in list(vars(module).items()):
                if value is holder:
                    return name
                if vars(module) is holder:
                    return module.__name__
    return ""


def _late_gradients(observer: "Observer", spans: list[BlockSpan], begin: int) -> Iterator[Remedy]:
    """Gradients of the last iteration that are alive while forward runs."""
    blocks = observer.memory.blocks
    forwards = [clock for clock, phase in blocks.phases if phase == "forward" and clock > begin]
    backwards = [clock for clock in blocks.backwards if clock > begin]
    if not forwards or not backwards:
        return
    old = (span for span in spans if span.block.kind == GRADIENTS and span.begin == begin)
    late = [span for span in old if begin < forwards[0] < span.end]
    if not late:
        return
    nbytes = sum(span.nbytes for span in late)
    late_blocks = {id(span.block) for span in late}
    lasting = [span for span in late if span.end > backwards[0]]  # zeroed in place
    earlier = [span._replace(begin=backwards[0]) for span in lasting]
    without, _ = peak_of([*(span for span in spans if id(span.block) not in late_blocks), *earlier])
    if lasting:
        where, advice = _step_line(observer), "call zero_grad(set_to_none=True) right after the step"
    else:
        ended = next((span.block.ended for span in late if span.block.ended), None)
        where = f"{ended.file}:{ended.line}" if ended else _step_line(observer)
        advice = "call zero_grad() right after the step"
    yield Remedy("gradients outlive the step into the next forward", where, advice, nbytes, without)


def _step_line(observer: "Observer") -> str:
    """The line of the last optimizer's step."""
    for block in reversed(observer.memory.blocks.all):
        if block.origin.phase == STEP and block.origin.file:
            return f"{block.origin.file}:{block.origin.line}"
    return ""


def _step_temporaries(observer: "Observer", spans: list[BlockSpan]) -> Iterator[Remedy]:
    """What the optimizer allocates for all parameters at once, if that makes the peak."""
    peak = observer.record.peak
    if peak is None or peak.phase != STEP:
        return
    own = [span for span in spans if _is_of_step(span.block)]
    without, _ = peak_of(span for span in spans if not _is_of_step(span.block))
    if without >= peak.nbytes:
        return
    if any("_foreach_" in span.block.op for span in own):
        largest = max(span.nbytes for span in own)
        what = "the optimizer's temporaries are the peak: it updates all parameters at once"
        advice, without = (
            "give the optimizer foreach=False, or fused=True where it has that",
            without + largest,
        )
    else:
        what = "the optimizer's temporaries are the peak, which no plan of forward and backward lowers"
        advice = "give the optimizer fused=True, where it has that"
    yield Remedy(what, _step_line(observer), advice, peak.nbytes - without, min(without, peak.nbytes))


def _is_of_step(block: LiveBlock) -> bool:
    return block.origin.phase == STEP and block.kind in (TEMPORARIES, KERNELS)


def _idle_calls(observer: "Observer", middle: int) -> set[int]:
    """Calls with gradients whose result nobody differentiates, decided by all calls of the same line.

    Those after `middle` may be differentiated later, so a line needs an earlier one.
    """
    lines: dict[tuple[str, str, int], list[int]] = {}
    for call, (_, module, file, line, _) in observer.call_lines.items():
        lines.setdefault((module, file, line), []).append(call)
    phases = observer.memory.blocks.phases
    begun = {call for call, at in observer.call_phases.items() if at < len(phases)}
    early = {call for call in begun if phases[observer.call_phases[call]][0] <= middle}
    return {
        call
        for calls in lines.values()
        if not any(map(observer.loop.is_used, calls)) and calls[0] in early
        for call in calls
        if call in begun
    }


def _idle_graphs(observer: "Observer", spans: list[BlockSpan], idle: Collection[int]) -> Iterator[Remedy]:
    """Calls with gradients whose result nobody differentiates."""
    lines: dict[str, set[int]] = {}
    for call in idle:
        origin = observer.call_lines[call]
        lines.setdefault(f"{origin.file}:{origin.line}", set()).add(call)
    for where, calls in lines.items():
        own = [span for span in spans if span.block.origin.call in calls]
        nbytes, _ = peak_of(own)
        without, _ = peak_of(span for span in spans if span.block.origin.call not in calls)
        if own:
            yield Remedy(
                "a call keeps what backward would need, and nobody calls backward",
                where,
                "put it under torch.no_grad()",
                nbytes,
                without,
            )


def describe_failure(observer: "Observer", error: BaseException | None, op: str) -> None:
    """What is alive as memory ends."""
    if observer.memory.is_on:
        origin, phase = observer.origin(), observer.phase()
        alive = _alive_now(observer)
    else:
        alive, origin, phase = list(_found_now(observer)), _line_of(error), ""
        observer.record.notes.append(
            "memory ended outside the observed iterations: what was alive is what Python's objects hold;"
            " tensors that autograd saved are not among them"
        )
    shown = _short(described(alive, phase))
    where = f"{origin.file}:{origin.line}" if origin.file else ""
    observer.record.failure = Failure(
        type(error).__name__, str(error)[:500], op, replace(shown, module=origin.module, where=where)
    )


def _alive_now(observer: "Observer") -> list[LiveBlock]:
    """The blocks that are alive, with the kinds that they have as far as can be known."""
    blocks = observer.memory.blocks
    return [replace(block, kind=blocks.kind_of(block, lambda _: False)) for block in observer.memory.alive()]


def describe_so_far(observer: "Observer") -> None:
    """What is alive in the middle of an iteration."""
    origin = observer.origin()
    shown = _short(described(_alive_now(observer), observer.phase()))
    where = f"{origin.file}:{origin.line}" if origin.file else ""
    observer.record.so_far = replace(shown, module=origin.module, where=where)


def _found_now(observer: "Observer") -> Iterator[LiveBlock]:
    """The tensors that Python's objects hold, each storage once."""
    observer.memory.forget()
    own = {id(parameter) for parameter in observer.parameters()}
    states = (list(optimizer.state.values()) for optimizer in list(observer.optimizers))
    state = {id(leaf) for leaf in pytree.tree_leaves(list(states)) if isinstance(leaf, Tensor)}
    gradients = {id(g) for p in observer.parameters() if p.is_leaf and (g := gradient_of(p)) is not None}
    for tensor in instances_of([Tensor, nn.Parameter, nn.Buffer]):
        kind = PARAMETERS if id(tensor) in own else GRADIENTS if id(tensor) in gradients else ""
        kind = kind or (STATE if id(tensor) in state else "")
        kind = kind or (ACTIVATIONS if tensor.grad_fn is not None else OTHER)
        if observer.memory.block_of(tensor) is None:
            block = observer.memory.note(tensor, kind)
            if block is not None:
                yield block


def _line_of(error: BaseException | None) -> BlockOrigin:
    found = BlockOrigin("")
    step: Any = None if error is None else error.__traceback__
    while step is not None:
        if is_users_file(step.tb_frame.f_code.co_filename):
            found = BlockOrigin("", file=step.tb_frame.f_code.co_filename, line=step.tb_lineno)
        step = step.tb_next
    return found
