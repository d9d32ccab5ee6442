"""The page of the zoo: what became of each model, and the causes of refusals."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill

import torch

from benchmarks.zoo.run import Result
from stowplan.units import format_bytes

_OPENING = (
    "Written by `python -m benchmarks.zoo` on PyTorch {version}. Each model is tiny and has random weights."
    " It is planned at a roomy budget and at a tight one: 0.7 of eager's peak, or the smallest if that is"
    " larger, with recomputation alone. Each planned model makes two optimizer steps on batches that it was"
    " not planned for, next to an eager twin. *Fitted* means that losses, parameters and buffers equal"
    " eager's to the bit, and that the allocator's peak is within the budget. (*Fitted, roomy* would mean"
    " that the tight budget was not tried.) A model that `fit` refuses is"
    ' tried with `torch.compile(model, backend="stowplan")` at 0.9 of eager\'s peak, or more if that is'
    " too little, with 60 s of processor time for each budget; *equal* there means the same bits after the"
    " same two steps."
)


def write_page(results: Sequence[Result], path: Path) -> None:
    """Write the page."""
    path.write_text("\n".join(_lines(results)) + "\n", encoding="utf-8")


def _lines(results: Sequence[Result]) -> Iterator[str]:
    yield "# Which models were tried?\n"
    yield fill(_OPENING.format(version=torch.__version__), 120) + "\n"
    outcomes = Counter(result.outcome for result in results)
    minutes = sum(result.seconds for result in results) / 60
    took = (
        f"The models took {minutes:.0f} minutes of processor time together, without imports and without"
        " torch.compile. A model that was run several times has its latest result here."
    )
    yield fill(took, 120) + "\n"
    yield f"| outcome | models of {len(results)} |"
    yield "|---|---|"
    for outcome, count in outcomes.most_common():
        yield f"| {outcome} | {count} |"
    yield ""
    causes = Counter((result.outcome, _cause(result)) for result in results if "fitted" not in result.outcome)
    if causes:
        yield "## Causes\n"
        yield "| outcome | cause | models |"
        yield "|---|---|---|"
        for (outcome, cause), _ in causes.most_common():
            names = ", ".join(r.name for r in results if (r.outcome, _cause(r)) == (outcome, cause))
            yield f"| {outcome} | {cause} | {names} |"
        yield ""
    if tried := [result for result in results if result.compiled]:
        yield "## Refused models under torch.compile\n"
        yield "| model | `fit` says | `torch.compile` |"
        yield "|---|---|---|"
        for result in tried:
            yield f"| {result.name} | {_cell(_placed(result.cause))} | {_cell(_placed(result.compiled))} |"
        yield ""
    yield "## Models\n"
    yield "| package | model | outcome | eager's peak | tight budget | measured | processor time |"
    yield "|---|---|---|---|---|---|---|"
    for result in sorted(results, key=lambda result: (result.package, result.name.lower())):
        sizes = (result.eager_bytes, result.tight_bytes, result.measured_bytes)
        shown = " | ".join(format_bytes(size) if size else "" for size in sizes)
        yield f"| {result.package} | {result.name} | {result.outcome} | {shown} | {result.seconds:.0f} s |"


def _cause(result: Result) -> str:
    """The cause without the line, which is another for each model."""
    words = result.cause.split("; ")[0]
    place, _, rest = words.partition(": ")
    return _cell(rest if ".py:" in place else words)[:150] or "no word"


def _placed(words: str) -> str:
    """Files by their place in the package that they belong to."""
    return re.sub(r"\S*/(site-packages|benchmarks)/", "", words)


def _cell(words: str) -> str:
    return words.replace("|", "\\|")
