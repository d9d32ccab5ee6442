"""Every entry of PyTorch's databases through `fit` and `torch.compile`: the run writes docs/databases.md.

An entry is equal, refused with a cause, or a fault. `make databases` tries one sample of each op in five
dtypes and of each module, SIZE=short in float32 alone, SIZE=long all samples. ONLY="prod max" runs those
whose name holds one of these words. The page is written anew when a dtype is done. RESULTS names a file of
lines that every answer is added to: what has an answer there is left out unless ONLY names it, so a run may
be made in several parts, and entries may be repeated after a repair. SIZE=none runs nothing and writes the
page of what RESULTS has. Each part of a database runs in a
process of its own; if it ends without an answer, the entry that it was at is a fault, and another process
goes on behind it.
"""

import gc
import json
import logging
import os
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import run
from typing import NamedTuple

import torch

from tests.support.databases import (
    MODULES,
    OP_DATABASES,
    OPTIMIZERS,
    Entry,
    Outcome,
    Result,
    Setup,
    is_differentiated,
    module_entries,
    op_entries,
    optimizer_entries,
    results_of,
)
from tests.support.machine import same_everywhere

PAGE = Path(__file__).parents[1] / "docs" / "databases.md"
_DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.float16, torch.float64)
_SIZES: dict[str, dict[torch.dtype, int | None]] = {
    "none": {},
    "short": {torch.float32: 1},
    "": dict.fromkeys(_DTYPES, 1),
    "long": dict.fromkeys(_DTYPES, None),
}
_OF_A_PART = 30  # ops or modules; what a process gathers is gone with it
_LIMIT_SECONDS = 300  # of a processor, for one entry: then it counts as crashed
_UNTIL_IT_HANGS = 1800.0  # by the clock: a busy machine gives a process a part of a processor

_HEAD = """# Which of PyTorch's own samples were tried?

Written by `make databases` on {date}, with PyTorch {torch}, of {commits}.
PyTorch tests itself with databases of ops (`op_db`), higher-order ops (`hop_db`), ops that users register
(`custom_op_db`), modules (`module_db`) and optimizers (`optim_db`). Each sample here is a training step: its
tensors are parameters, a scalar of the result is differentiated, and two iterations with different values run
in eager and in three ways: `fit` with a roomy budget, `fit` with the smallest budget that its refusal of one
byte names, and the backend of `torch.compile`. *Equal* means that losses, gradients, parameters and buffers
have eager's bits. *Late* is a refusal after planning, or of the budget that a refusal named. *Crashed* is a
process that ended. *Tried* is how many of the ops, modules or optimizers of a database ran in this dtype, of
those that have gradients in it, {samples}.
Samples that eager cannot differentiate, or for which eager differs from itself, are left out.
The run took {minutes:.0f} minutes of a processor.

{planned}

| database | tried | way | samples | equal | refused | different | untyped error | late | crashed |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Part:
    """Some neighbours in one database."""

    database: str
    where: slice
    dtype: torch.dtype = torch.float32
    most: int | None = 1

    def entries(self) -> Iterator[Entry]:
        if self.database in OP_DATABASES:
            return op_entries(self.database, self.dtype, self.most, self.where)
        if self.database == "module_db":
            return module_entries(self.most, self.where)
        return optimizer_entries(self.where)


def parts(dtype: torch.dtype, most: int | None) -> Iterator[Part]:
    """The ops in one dtype, and all else with the first one."""
    if dtype is _DTYPES[0]:
        yield from (Part("optim_db", where) for where in _cut(len(OPTIMIZERS)))
        yield from (Part("module_db", where, most=most) for where in _cut(len(MODULES)))
    for database, ops in OP_DATABASES.items():
        yield from (Part(database, where, dtype, most) for where in _cut(len(ops)))


def _cut(count: int) -> Iterator[slice]:
    return (slice(start, start + _OF_A_PART) for start in range(0, count, _OF_A_PART))


class Answer(NamedTuple):
    """What became of an entry, and the processor's seconds that it took."""

    database: str
    name: str
    found: dict[Setup, Result]
    seconds: float = 0.0
    commit: str = ""  # that it was run on

    @property
    def entry(self) -> tuple[str, str]:
        return self.database, self.name

    def line(self) -> str:
        found = {way: (result.outcome, result.cause) for way, result in self.found.items()}
        return json.dumps([self.database, self.name, found, round(self.seconds, 2), self.commit]) + "\n"

    @classmethod
    def of_line(cls, line: str) -> "Answer":
        database, name, told, seconds, commit = json.loads(line)
        found = {Setup(way): Result(Outcome(outcome), cause) for way, (outcome, cause) in told.items()}
        return cls(database, name, found, seconds, commit)


Answers = Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which entries run: those whose name holds one of the words; without words, those not known yet."""

    words: Sequence[str]
    known: Collection[tuple[str, str]]

    def takes(self, entry: Entry) -> bool:
        if self.words:
            return any(word in entry.name for word in self.words)
        return (entry.database, entry.name) not in self.known


def answers(part: Part, choice: Choice) -> Iterator[Answer]:
    """The answers of the entries of a part, from processes that may crash."""
    context, done = get_context("fork"), 0
    while True:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(theirs, part, choice, done))
        worker.start()
        theirs.close()
        at = None
        try:
            while ours.poll(_UNTIL_IT_HANGS):
                told = ours.recv()
                if told is None:
                    return
                if isinstance(told, Answer):
                    yield told
                    done += 1
                at = None if isinstance(told, Answer) else told
            cause = f"no answer in {_UNTIL_IT_HANGS:.0f} s"
        except EOFError:
            worker.join()
            cause = f"exit code {worker.exitcode}"
        finally:
            worker.kill()
            worker.join()
        if at is None:
            raise RuntimeError(f"{part}: {cause} between entries")
        yield Answer(at[0], at[1], dict.fromkeys(Setup, Result(Outcome.CRASHED, cause)))
        done += 1


def _work(told: Connection, part: Part, choice: Choice, done: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    for entry in islice(filter(choice.takes, part.entries()), done, None):
        told.send((entry.database, entry.name))
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(began) + _LIMIT_SECONDS, hard))
        found = results_of(entry)
        told.send(Answer(entry.database, entry.name, found, time.process_time() - began))
    told.send(None)


def _cause(text: str) -> str:
    """A refusal without the numbers and names of one sample."""
    plain = re.sub(r"^\w+: (?:\S+\.py:\d+: )?", "", text.partition(";")[0].replace("\n", " "))
    return re.sub(r"\(\d[\d, ]*,?\)", "(...)", plain)[:150].replace("|", "/")


def _share(results: Answers, database: str) -> str:
    """How many of a database are equal in each way."""
    of = [answer.found for answer in results if answer.database.partition(",")[0] == database]
    equal = (sum(found[way].outcome is Outcome.EQUAL for found in of) for way in Setup)
    shares = (
        f"{100 * count / max(1, len(of)):.1f} % ({way})" for way, count in zip(Setup, equal, strict=True)
    )
    return f"Of `{database}`, {', '.join(shares)} are planned and equal."


def _is_of_op(answer: Answer) -> bool:
    return answer.database.partition(",")[0] in OP_DATABASES


def _tried(results: Answers, database: str) -> str:
    """How many ops, modules or optimizers of a database have an answer, of those that have gradients."""
    tried = {answer.name.partition(" ")[0] for answer in results if answer.database == database}
    name, _, dtype = database.partition(", ")
    if name in OP_DATABASES:
        all_of_them = len([op for op in OP_DATABASES[name] if is_differentiated(op, getattr(torch, dtype))])
    else:
        all_of_them = len({"module_db": MODULES, "optim_db": OPTIMIZERS}[name])
    return f"{len(tried)} of {all_of_them}"


def page(results: Answers) -> str:
    """The page with its tables."""
    ran = [answer for answer in results if answer.found[Setup.ROOMY].outcome is not Outcome.NOT_EAGER]
    counts = Counter((answer.database, way, r.outcome) for answer in ran for way, r in answer.found.items())
    kinds = [kind for kind in Outcome if kind is not Outcome.NOT_EAGER]
    rows = []
    for database in dict.fromkeys(answer.database for answer in ran):
        for way in Setup:
            numbers = [counts[database, way, kind] for kind in kinds]
            numbers = [sum(numbers), *numbers]
            rows.append(
                f"| {database} | {_tried(results, database)} | {way} | {' | '.join(map(str, numbers))} |"
            )
    causes: dict[tuple[Outcome, str], list[tuple[Setup, str]]] = {}
    for answer in ran:
        for way, result in answer.found.items():
            if result.outcome is not Outcome.EQUAL:
                causes.setdefault((result.outcome, _cause(result.cause)), []).append((way, answer.name))
    listed = sorted(causes.items(), key=lambda item: (not item[0][0].is_fault, -len(item[1])))
    columns = f"| outcome | cause | {' | '.join(Setup)} | of |"
    table = ["", "## Causes", "", columns, "|---|---|---|---|---|---|"]
    for (outcome, cause), cases in listed:
        of = list(dict.fromkeys(re.sub(r" \d+$| \d+, \w+$", "", name) for _, name in cases))
        few = ", ".join(of[:4]) + (f" and {len(of) - 4} more" if len(of) > 4 else "")
        ways = Counter(way for way, _ in cases)
        table.append(f"| {outcome} | {cause} | {' | '.join(str(ways[way]) for way in Setup)} | {few} |")
    ops = Counter((answer.database, answer.name.partition(" ")[0]) for answer in results if _is_of_op(answer))
    most = max(ops.values(), default=0)
    commits = Counter(answer.commit for answer in results)
    named = (f"commit {commit} ({count:,} entries)" for commit, count in commits.most_common())
    planned = "\n".join(_share(ran, database) for database in ("op_db", "module_db"))
    head = _HEAD.format(
        date=date.today(),
        torch=torch.__version__,
        commits=", ".join(named),
        samples="with one sample of each op" if most == 1 else f"with at most {most} samples of each op",
        minutes=sum(answer.seconds for answer in results) / 60,
        planned=planned,
    )
    return head + "\n".join((*rows, *table)) + "\n"


def main() -> None:
    """Run, write the page, and fail if there is a fault."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    words = os.environ.get("ONLY", "").split()
    samples = _SIZES[os.environ.get("SIZE", "")]
    kept = Path(named) if (named := os.environ.get("RESULTS")) else None
    known = {answer.entry: answer for answer in _read(kept)}
    commit = _commit()
    with same_everywhere():
        results_of(next(optimizer_entries()))  # what is imported at first use, no process need import again
        gc.freeze()  # the databases are many objects, among which fit would look for other models
        for dtype, most in samples.items():
            for part in parts(dtype, most):
                for made in answers(part, Choice(words, frozenset(known))):
                    answer = made._replace(commit=commit)
                    known[answer.entry] = answer
                    _tell(answer)
                    if kept is not None:
                        with kept.open("a", encoding="utf-8") as lines:
                            lines.write(answer.line())
            if kept is not None or not words:
                PAGE.write_text(page(list(known.values())), encoding="utf-8")
    if not samples:
        PAGE.write_text(page(list(known.values())), encoding="utf-8")
    outcomes = Counter(str(r.outcome) for answer in known.values() for r in answer.found.values())
    print(*outcomes.items())
    if any(r.outcome.is_fault for answer in known.values() for r in answer.found.values()):
        sys.exit(1)


def _commit() -> str:
    told = run(["git", "describe", "--always", "--dirty"], cwd=PAGE.parent, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def _read(kept: Path | None) -> list[Answer]:
    if kept is None or not kept.exists():
        return []
    return [Answer.of_line(line) for line in kept.read_text(encoding="utf-8").splitlines()]


def _tell(answer: Answer) -> None:
    for way, result in answer.found.items():
        if result.outcome not in (Outcome.EQUAL, Outcome.NOT_EAGER):
            print(
                f"{answer.database}: {answer.name}: {way}: {result.outcome}: {result.cause[:300]}", flush=True
            )


if __name__ == "__main__":
    main()
