"""The page of repositories: what ran, what became of it, and the causes of refusals."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill

import torch

from benchmarks.repositories.run import FAULTS, Outcome, Result, Setup
from benchmarks.repositories.training import Entry
from stowplan.units import format_bytes

_OPENING = """# Which public repositories were trained?

Written by `make repositories` on PyTorch {torch}. Each row is a repository's own model and loss, and
where it has several networks its loop, at small size on synthetic data. It trains for three iterations
in eager and again in each way: *plain* is `fit` at a roomy budget, and with recomputation alone at
{tight} of what eager takes above parameters, buffers and arguments; *optimizer=* is that budget and
room for the optimizer's state; *tiles, offload* allows all three techniques at {tighter}; *backend* is
`torch.compile(backend="stowplan")` at 0.9 of eager's peak. A budget that is refused is raised to the
smallest. *Equal* means that losses, gradients, parameters, buffers, optimizer state and the state of
PyTorch's generator have the same bits, and that the measured peak of a single network that
returns its loss is within its budget. *Within rounding* is said of plans with tiles: the first iteration
is compared. The optimizers are the repository's where it sets one, else AdamW.

{summary}

"""
_CLOSING = """
## Run it

Nothing of these repositories is part of stowplan: `benchmarks/repositories/families` has for each the
commit, how the model is built and how data is made. `make repositories FOLDER=...` takes the folder of
the snapshots:

| place | contents |
|---|---|
| `FOLDER/OWNER+NAME` | a git checkout of the commit; another commit is refused |
| `FOLDER/pip` | what their code imports: `pip install --no-deps --target FOLDER/pip {packages}` |

`python -m benchmarks.repositories --manifest` prints repositories and commits. `python -m
benchmarks.repositories nanoGPT --way plain` runs a part. Packages that a repository imports for nothing
that runs here (data sets, plots, logs) are stood in for by empty ones; the entry names them.
"""
PACKAGES = (
    "einops einx frozendict loguru torch_einops_utils hyper_connections beartype local_attention"
    " axial_positional_embedding rotary_embedding_torch ema_pytorch jaxtyping wadler_lindig termcolor"
    " omegaconf antlr4-python3-runtime==4.9.3 ftfy more_itertools tiktoken timm==0.4.12"
)
_GOOD = (Outcome.EQUAL, Outcome.CLOSE)


def write_page(entries: Mapping[str, Entry], results: Sequence[Result], path: Path) -> None:
    """Write the page."""
    path.write_text("".join(_parts(entries, results)), encoding="utf-8")


def _parts(entries: Mapping[str, Entry], results: Sequence[Result]) -> Iterator[str]:
    found: dict[str, dict[str, Result]] = {}
    for result in results:
        if result.name in entries and result.outcome not in (Outcome.ABSENT, Outcome.EAGER):
            found.setdefault(result.name, {})[result.way] = result
    ran = {name: entry for name, entry in entries.items() if name in found}
    published = [name for name, entry in ran.items() if not entry.change]
    summary = _summary(ran, published, found, len(entries))
    yield _OPENING.format(torch=torch.__version__, tight=0.7, tighter=0.6, summary=summary)
    yield f"| repository | commit | part | {' | '.join(Setup)} | planned peak | eager's | note |\n"
    yield "|---" * (len(Setup) + 6) + "|\n"
    for name, entry in sorted(ran.items(), key=lambda item: (item[1].repository.lower(), item[0])):
        yield _row(entry, found[name])
    refusals = [result for name in ran for result in found[name].values() if result.words]
    if refusals:
        yield "\n## What the refusals and faults say\n\n"
        yield "| entry | way | outcome | words |\n|---|---|---|---|\n"
        for result in refusals:
            words = re.sub(r"\S*/(?:pip/|[\w.-]+\+([\w.-]+/))", r"\1", result.words).replace("|", "\\|")
            yield f"| {result.name} | {result.way} | {result.outcome} | {words} |\n"
    yield _CLOSING.format(packages=PACKAGES)


def _summary(
    ran: Mapping[str, Entry], published: Sequence[str], found: Mapping[str, Mapping[str, Result]], known: int
) -> str:
    """How many repositories ran in each way, and what became of them."""
    of = {name: entry.repository for name, entry in ran.items()}
    lines = [f"{len(set(of.values()))} repositories ran, in {len(ran)} of the {known} entries."]
    equal = {of[name] for name in published if _outcome(found[name], Setup.PLAIN) == Outcome.EQUAL}
    changed = {of[name] for name in ran if _outcome(found[name], Setup.PLAIN) == Outcome.EQUAL} - equal
    lines.append(
        f"{len(equal)} of the repositories train with equal bits under plain `fit` as they are published,"
        f" {len(changed)} more after the change that their row names."
    )
    for way in Setup:
        counts = Counter(each[way].outcome for each in found.values() if way in each)
        told = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
        lines.append(f"{way}: {told or 'not run'}.")
    faults = sum(result.outcome in FAULTS for each in found.values() for result in each.values())
    lines.append(f"Faults (a wrong bit, a peak above the budget, an untyped error): {faults}.")
    return "\n".join(fill(line, 120) for line in lines)


def _outcome(results: Mapping[str, Result], way: Setup) -> str:
    return results[way].outcome if way in results else ""


def _row(entry: Entry, results: Mapping[str, Result]) -> str:
    ways = " | ".join(_outcome(results, way) for way in Setup)
    plain = results.get(Setup.PLAIN)
    sizes = (
        [format_bytes(size) if size else "" for size in (plain.planned_bytes, plain.eager_bytes)]
        if plain
        else ["", ""]
    )
    absent = f"without {', '.join(entry.absent)}" if entry.absent else ""
    changed = f"changed: {entry.change}" if entry.change else ""
    note = "; ".join(filter(None, (changed, entry.note, absent)))
    cells = (entry.repository, f"`{entry.commit[:7]}`", entry.part, ways, *sizes, note)
    return f"| {' | '.join(cells)} |\n"
