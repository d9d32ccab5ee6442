"""What the page says of each study: its words, its plots, and who is ahead."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.plots import Axis, Bar, Point, Series, bars, scatter
from benchmarks.results import Result
from stowplan.report.picture.shapes import Drawing
from stowplan.units import format_bytes

_OURS, _PLAIN = "#2f6fb5", "#45505e"
_FAMILIES = {  # by what the name of a way contains: what it is called, and its colour
    "kernels compiled": ("stowplan, compiled kernels", "#8a5bbf"),
    "stowplan": ("stowplan", _OURS),
    "checkpoint": ("checkpoint per block", "#1f9d7a"),
    "inductor": ("torch.compile, inductor", "#d1582a"),
    "budget": ("memory budget, eager kernels", "#e09a1a"),
    "eager": ("eager", _PLAIN),
}
_SAME = 1.005  # peaks that are no further apart are one


@dataclass(frozen=True, slots=True)
class Section:
    """One study on the page."""

    study: str
    title: str
    words: tuple[str, ...]
    drawings: tuple[Drawing, ...]
    results: Sequence[Result]


def _peers(results: Sequence[Result]) -> Section:
    nets = list(dict.fromkeys(result.case for result in results))
    drawings = (_against_peers(net, _by_way(results, net)) for net in nets)
    opening = (
        "Peak and time of a training step with the methods that a user would choose: "
        "`torch.utils.checkpoint` around each block, and `torch.compile` with an activation memory budget "
        "of 0.7, 0.5, 0.3 and 0.1. "
        "stowplan gets the peak of each method as its budget, and half and a quarter of the activations. "
        "Left and down is better; peaks within half a percent count as equal."
    )
    return Section(
        "peers", "Compared with other methods", (opening, *_verdict(results)), tuple(drawings), results
    )


def _kernels(results: Sequence[Result]) -> Section:
    nets = list(dict.fromkeys(result.case for result in results))
    drawings = tuple(_against_peers(net, _by_way(results, net)) for net in nets)
    words = (
        "Plans with eager's kernels and plans with compiled groups of ops, beside `torch.compile` (inductor) "
        "without a budget and with activation memory budgets of 0.7, 0.5, 0.3 and 0.1. "
        "Every plan has a peak of one of the others as its budget, or half or a quarter of the activations.",
        *_verdict(results),
        *(told for net in nets if (told := _shares(net, _by_way(results, net)))),
    )
    return Section("kernels", "Compiled kernels", words, drawings, results)


def _shares(net: str, ways: Mapping[str, Mapping[str, Result]]) -> str:
    """The times of the best plans within no budget, half and a quarter of the activations."""
    compiled = ways.get("inductor, no budget")
    ours = [figures for way, figures in ways.items() if "stowplan" in way]
    if compiled is None or not ours:
        return ""
    best = min(figures["time"].value for figures in ours)
    told = [
        f"{net}: the fastest plan takes {best / compiled['time'].value:.3f} of inductor's without a budget"
    ]
    for share in ("half", "a quarter"):
        goals = [f for way, f in ways.items() if "stowplan" in way and f"{share} of the activations" in way]
        if goals:
            budget = max(figures["peak"].value for figures in goals)
            within = min(f["time"].value for f in ours if f["peak"].value <= budget)
            told.append(f"with {share} of the activations {within:.3f} of eager's")
        else:
            told.append(f"there is no plan with {share} of the activations")
    return ", ".join(told) + "."


def _by_way(results: Sequence[Result], case: str) -> dict[str, dict[str, Result]]:
    found: dict[str, dict[str, Result]] = {}
    for result in results:
        if result.case == case:
            found.setdefault(result.way, {})[result.figure] = result
    return found


def _against_peers(net: str, ways: Mapping[str, Mapping[str, Result]]) -> Drawing:
    families: dict[tuple[str, str], list[Point]] = {}
    for way, figures in ways.items():
        family = next(told for word, told in _FAMILIES.items() if word in way)
        time = figures["time"]
        point = Point(figures["peak"].value / 2**20, time.value, time.spread)
        families.setdefault(family, []).append(point)
    series = [
        Series(name, colour, tuple(points), joined="stowplan" in name)
        for (name, colour), points in families.items()
    ]
    return scatter(net, Axis("peak, MiB", "{:,.0f}".format), Axis("time of eager", "{:.2f}".format), series)


_RULE = (
    "Each method is compared with the fastest plan within its peak. One is ahead of the other where its"
    " median is lower and their quartiles do not overlap; where they overlap, the two are level."
)


def _verdict(results: Sequence[Result]) -> Iterator[str]:
    """The rule, and where plans are not ahead by it."""
    ahead, level = list[str](), list[str]()
    for net in dict.fromkeys(result.case for result in results):
        ways = _by_way(results, net)
        ours = [figures for way, figures in ways.items() if "stowplan" in way]
        for way, figures in ways.items():
            if "stowplan" in way or way == "eager":
                continue
            peak, time = figures["peak"].value, figures["time"]
            within = [mine["time"] for mine in ours if mine["peak"].value <= peak * _SAME]
            best = min(within, key=lambda mine: mine.value, default=None)
            method = f"{net}, {way}: within {format_bytes(round(peak))}"
            if best is None:
                ahead.append(f"{method} there is no plan")
            elif not _slower(time, best):
                told = ahead if _slower(best, time) else level
                told.append(f"{method} {time.value:.3f} of eager, stowplan {best.value:.3f}")
    yield _RULE
    yield f"Other methods are ahead here: {'; '.join(ahead)}." if ahead else "No other method is ahead."
    if level:
        yield f"Level: {'; '.join(level)}."


def _slower(one: Result, other: Result) -> bool:
    """Whether one takes longer than the other, at its lower quartile too."""
    slow, fast = (result.spread or (result.value, result.value) for result in (one, other))
    return slow[0] > fast[1]


def _tiles(results: Sequence[Result]) -> Section:
    rows = [
        Bar(
            case,
            tiled["peak"].value,
            plain["peak"].value,
            f", {tiled['time'].value:.2f} of its time" if "time" in tiled else "",
            "#8a5bbf",
        )
        for case in dict.fromkeys(result.case for result in results)
        if (ways := _by_way(results, case)) and (plain := ways.get("eager")) and (tiled := ways.get("tiles"))
    ]
    words = (
        "Steps in tiles, with budgets that recomputation alone cannot meet: "
        "measured peaks and times against eager."
    )
    return Section("tiles", "Tiles", (words,), _bars("peak of the step", rows), results)


def _offload(results: Sequence[Result]) -> Section:
    rows = [
        Bar(
            case,
            ways["offload"]["peak"].value,
            ways["baseline"]["peak"].value,
            f", {ways['offload']['time'].value:.2f} of its time",
            "#1f9d7a",
        )
        for case in dict.fromkeys(result.case for result in results)
        if (ways := _by_way(results, case))
    ]
    words = "Plans that only offload tensors to this machine's disk, in parallel with the ops: the same bits."
    return Section("offload", "Offload to disk", (words,), _bars("peak of the step", rows), results)


def _bars(title: str, rows: Sequence[Bar]) -> tuple[Drawing, ...]:
    return (bars(title, rows, lambda size: format_bytes(round(size))),) if rows else ()


def _planning(results: Sequence[Result]) -> Section:
    series = []
    for net, colour in (("gpt", _OURS), ("llama", "#d1582a")):
        cases = dict.fromkeys(result.case for result in results if result.case.startswith(net))
        found = [_by_way(results, case)["stowplan"] for case in cases]
        points = tuple(Point(row["ops"].value, row["search"].value) for row in found)
        if points:
            series.append(Series(net, colour, points, joined=True))
    plot = scatter(
        "seconds to search all budgets and answer one",
        Axis("ops of the step", "{:,.0f}".format, from_zero=True),
        Axis("seconds", "{:,.0f}".format, from_zero=True),
        series,
    )
    words = (
        "Time from a captured step to a plan with its lower bound, at 70 % of the baseline's peak, "
        "as networks grow."
    )
    return Section("planning", "Planning time", (words,), (plot,), results)


def _projection(results: Sequence[Result]) -> Section:
    errors = [result for result in results if result.figure == "peak error" and result.way == "probe"]
    worst = max(errors, key=lambda result: abs(result.value))
    words = (
        "Projected peaks of eager steps against measured ones: from the graph alone, with the table of "
        "kernel workspaces (nothing runs), and with each distinct op probed once. Times: the sum over "
        "the probed ops against a step's processor time.",
        f"With probes, the projection is off by {abs(worst.value):.2%} at most ({worst.case}).",
    )
    return Section("projection", "Projected before anything runs", words, (), results)


def _plainly(title: str, words: str) -> Callable[[Sequence[Result]], Section]:
    def build(results: Sequence[Result]) -> Section:
        return Section(results[0].study, title, (words,), (), results)

    return build


SECTIONS: Mapping[str, Callable[[Sequence[Result]], Section]] = {
    "peers": _peers,
    "kernels": _kernels,
    "tiles": _tiles,
    "offload": _offload,
    "joint": _plainly(
        "All techniques in one plan",
        "Projected times of each technique alone, and of all together, by budget.",
    ),
    "shards": _plainly(
        "Several workers", "Processes on this machine, over gloo; peaks are above parameters and gradients."
    ),
    "guards": _plainly(
        "Whether a plan still applies", "What is asked before each step, by processor time of one thread."
    ),
    "iteration": _plainly(
        "The whole iteration",
        "Forward, backward and AdamW's step of a GPT with 88 MiB of parameters and of GPT-2 small;"
        " all memory is counted. Times are of the processor, on the training thread. The clock agrees"
        " but for state on disk, which waits for its transfers: docs/measured.md has both.",
    ),
    "planning": _planning,
    "lengths": _plainly(
        "Batches of many shapes",
        "A small GPT on random lengths and batch sizes under one budget, against the same steps in eager, "
        "by the processor time of the thread; and plans carried over to other sizes against plans searched"
        " for them.",
    ),
    "latency": _plainly(
        "Waiting for a plan",
        "Processor seconds of one thread with empty caches, from a call of `fit` or a command to its answer; "
        "the time to import PyTorch and to build the model does not count.",
    ),
    "projection": _projection,
    "optimizers": _plainly(
        "Optimizers", "Projected peaks of training with an optimizer against measured ones."
    ),
}
