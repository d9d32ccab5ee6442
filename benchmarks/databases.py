"""Every entry of PyTorch's databases through `fit`, and docs/databases.md, which the run writes.

An entry is equal, refused with a cause, or a fault. `make databases SIZE=short` tries one sample of each op
in float32 and of each module. ONLY="prod max" runs those whose name holds one of these words, and writes no
page.
"""

import logging
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch

from tests.support.databases import (
    Entry,
    Outcome,
    Result,
    module_entries,
    op_entries,
    optimizer_entries,
    result_of,
)

PAGE = Path(__file__).parents[1] / "docs" / "databases.md"
_SAMPLES = {torch.float32: 4, torch.float64: 2, torch.bfloat16: 2}
_SHORT = {torch.float32: 1}

_HEAD = """# Which of PyTorch's own samples were tried?

Written by `make databases` on PyTorch {torch}. PyTorch tests itself with databases of ops (`op_db`), modules
(`module_db`) and optimizers (`optim_db`). Each sample here is a training step: its tensors are parameters, a
scalar of the result is differentiated, and two iterations with different values run in eager and by a plan at
a roomy budget. *Equal* means that losses, gradients, parameters and buffers have the same bits. Of each op,
{counts} are tried. Samples that eager cannot differentiate, or for which eager differs from itself, are left
out. The run took {minutes:.0f} minutes of processor time.

| database | samples | equal | refused | different | untyped error |
|---|---|---|---|---|---|
"""


def entries(samples: Mapping[torch.dtype, int]) -> Iterator[Entry]:
    """All entries; `samples` has the most of each op, by dtype."""
    ops = (op_entries(dtype, most) for dtype, most in samples.items())
    return chain(*ops, module_entries(max(samples.values())), optimizer_entries())


def _cause(text: str) -> str:
    """A refusal without the numbers and names of one sample."""
    plain = re.sub(r"^\w+: (?:\S+\.py:\d+: )?", "", text.partition(";")[0].replace("\n", " "))
    return re.sub(r"\(\d[\d, ]*,?\)", "(...)", plain)[:150].replace("|", "/")


def page(results: list[tuple[Entry, Result]], samples: Mapping[torch.dtype, int], seconds: float) -> str:
    """The page with its tables."""
    ran = [(entry, result) for entry, result in results if result.outcome is not Outcome.NOT_EAGER]
    counts = Counter((entry.database, result.outcome) for entry, result in ran)
    kinds = (Outcome.EQUAL, Outcome.REFUSED, Outcome.DIFFERENT, Outcome.UNTYPED)
    rows = []
    for database in dict.fromkeys(entry.database for entry, _ in ran):
        numbers = [counts[database, kind] for kind in kinds]
        rows.append(f"| {database} | {' | '.join(map(str, (sum(numbers), *numbers)))} |")
    causes: dict[tuple[Outcome, str], list[str]] = {}
    for entry, result in ran:
        if result.outcome is not Outcome.EQUAL:
            causes.setdefault((result.outcome, _cause(result.cause)), []).append(entry.name)
    listed = sorted(causes.items(), key=lambda item: (not item[0][0].is_fault, -len(item[1])))
    table = ["", "## Causes", "", "| outcome | cause | samples | of |", "|---|---|---|---|"]
    for (outcome, cause), names in listed:
        of = list(dict.fromkeys(re.sub(r" \d+$| \d+, \w+$", "", name) for name in names))
        few = ", ".join(of[:4]) + (f" and {len(of) - 4} more" if len(of) > 4 else "")
        table.append(f"| {outcome} | {cause} | {len(names)} | {few} |")
    bare = {str(dtype).removeprefix("torch."): most for dtype, most in samples.items()}
    of_each = " and ".join(f"at most {most} in {dtype}" for dtype, most in bare.items())
    head = _HEAD.format(torch=torch.__version__, counts=of_each, minutes=seconds / 60)
    return head + "\n".join((*rows, *table)) + "\n"


def main() -> None:
    """Run, write the page, and fail if there is a fault."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    words, begun = os.environ.get("ONLY", "").split(), time.process_time()
    results = []
    samples = _SHORT if os.environ.get("SIZE") == "short" else _SAMPLES
    for entry in entries(samples):
        if words and not any(word in entry.name for word in words):
            continue
        result = result_of(entry)
        results.append((entry, result))
        if result.outcome not in (Outcome.EQUAL, Outcome.NOT_EAGER):
            print(f"{entry.database}: {entry.name}: {result.outcome}: {result.cause[:300]}", flush=True)
    print(Counter(str(result.outcome) for _, result in results))
    if not words:
        PAGE.write_text(page(results, samples, time.process_time() - begun), encoding="utf-8")
    if any(result.outcome.is_fault for _, result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
