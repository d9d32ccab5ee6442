"""Damaged files for every reader, plan, record and cache: typed answers, soon, in little memory, or findings.

A case is a kind of file and a number. The number draws a sample of the kind, its damage, and what is done
with the file if it can be read: one of the verbs, or a small plan. `python -m tests.hunt.files --seconds 60`
hunts through all kinds; a finding is printed with the command that repeats it, and its file is made small.

Cases run in batches, each in a child that may take 1 GiB more than it begins with.
"""

import argparse
import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from traceback import extract_tb
from typing import TypeAlias

from stowplan import Search
from stowplan.analyse.training import training_step_of
from stowplan.cli.main import INTERNAL_ERROR, main
from stowplan.cli.simulate import read_machine
from stowplan.errors import BadInput, StowplanError
from stowplan.formats import chainer, graphtext, stow
from stowplan.formats.door import BINARY_READERS, READERS, BinaryReader, Reader, decoded
from stowplan.ir import Document, Graph
from stowplan.plan.explain.peers import read_peers
from stowplan.plan.files import plan_file, record_file
from stowplan.plan.options import PlanOptions
from stowplan.plan.prices import price_by_macs, price_by_profile
from stowplan.plan.pricing import Machine
from stowplan.plan.record import Difference, Record
from stowplan.plan.select import planner_of
from stowplan.run.cost.machine import Cost, Platform, ProbeCache
from tests.support.audit import AUDIT
from tests.support.mutations import mutant

from .structured import (
    damaged_graph,
    damaged_json,
    damaged_lines,
    damaged_pickle,
    damaged_protobuf,
    damaged_sealed,
    damaged_stow,
)

SAMPLES = Path(__file__).parents[1] / "formats" / "samples"
MOST_SECONDS = 2.0  # of the processor, for reading
MOST_SECONDS_AFTER = 10.0  # of the processor, for one thing done with what was read: a search takes some
MOST_BYTES = 2**30  # above what the process has when it begins
GOOD = ("refused", "accepted")
BAD = ("untyped", "slow", "large", "unplaced", "touched")
_BATCH = 1000
_STRUCTURED = 0.5  # share of cases whose damage knows the structure, where a kind has such
_BOTH = 0.1  # share of these that are damaged as text besides
_DONE = 0.2  # share of files that something is done with; reading takes a fraction of its time
_MOST_OPS = 40  # of graphs that are planned
_MOVES = 40
_SHRINKING_SECONDS = 20.0

Damage: TypeAlias = Callable[[bytes, Random], bytes]
Action: TypeAlias = Callable[[object, bytes, Path], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file. `is_quiet`: reading it touches nothing but memory, and refusals say where."""

    name: str
    samples: tuple[bytes, ...]
    read: Callable[[bytes, Path], object]
    damage: Damage | None
    actions: Mapping[str, Action]
    is_quiet: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case; `action` is what was being done, `where` the line that an error came from."""

    outcome: str
    action: str = "read"
    what: str = ""
    where: str = ""


@dataclass(slots=True)
class Tally:
    """Outcomes by kind, processor seconds by kind, and the findings: kind, seed and verdict."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, int, Verdict]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Count what another batch found."""
        for name, counts in other.outcomes.items():
            self.outcomes.setdefault(name, Counter()).update(counts)
        self.seconds.update(other.seconds)
        self.findings += other.findings

    @property
    def cases(self) -> int:
        """How many there were."""
        return sum(sum(counts.values()) for counts in self.outcomes.values())


class TooSlow(BaseException):
    """Raised by the timer, past whatever catches exceptions."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TooSlow(f"over {seconds} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# One case


def drawn(kind: Kind, seed: int) -> tuple[bytes, str | None]:
    """The file of a case, and what is done with it."""
    random = Random(f"{kind.name} {seed}")
    data = random.choice(kind.samples)
    by_structure = kind.damage is not None and random.random() < _STRUCTURED
    if kind.damage is not None and by_structure:
        data = kind.damage(data, random)
    if not by_structure or random.random() < _BOTH:
        data = _as_bytes(mutant(data.decode("latin-1"), _pieces(), random))
    action = random.choice(sorted(kind.actions)) if kind.actions and random.random() < _DONE else None
    return data, action


def _as_bytes(text: str) -> bytes:
    """Characters that are bytes as these, others in UTF-8."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", errors="surrogatepass")


@cache
def _pieces() -> tuple[str, ...]:
    return tuple(path.read_bytes().decode("latin-1") for path in sorted(SAMPLES.iterdir()))


def judged(kind: Kind, data: bytes, action: str | None, folder: Path) -> Verdict:
    """Read a file, do something with it, and say what came of it."""
    doing = "read"
    try:
        with _limited(MOST_SECONDS), AUDIT.on() as touched:
            value = kind.read(data, folder)
        if touched and kind.is_quiet:
            return Verdict("touched", doing, f"{touched[0]}")
        if action is not None:
            doing = action
            with _limited(MOST_SECONDS_AFTER):
                kind.actions[action](value, data, folder)
    except BadInput as fault:
        if data and kind.is_quiet and doing == "read" and not (fault.where and fault.what):
            return Verdict("unplaced", doing, str(fault))
        return Verdict("refused", doing)
    except StowplanError:
        return Verdict("refused", doing)
    except TooSlow as fault:
        return Verdict("slow", doing, str(fault), _place(fault))
    except MemoryError as fault:
        return Verdict("large", doing, f"over {MOST_BYTES} bytes", _place(fault))
    except Exception as fault:
        return Verdict("untyped", doing, f"{type(fault).__name__}: {fault}"[:200], _place(fault))
    return Verdict("accepted", doing)


def _place(fault: BaseException) -> str:
    """The innermost line of the package that a fault came through, or the innermost of all."""
    if told := re.search(r"internal error at (\S+:\d+)", str(fault)):
        return Path(told[1]).name
    frames = extract_tb(fault.__traceback__)
    frame = next((frame for frame in reversed(frames) if "/stowplan/" in frame.filename), frames[-1])
    return f"{Path(frame.filename).name}:{frame.lineno}"


# What is done with files


class _Unexpected(Exception):
    """A verb that ended as no verb may."""


def _verb(*words: str) -> Action:
    """Run a verb on the file; FILE and OUT stand for its path and for a place to write."""

    def run(_: object, data: bytes, folder: Path) -> None:
        (folder / "case").write_bytes(data)
        names = {"FILE": str(folder / "case")}
        told = [names.get(word, word.replace("OUT", str(folder / "out"))) for word in words]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), suppress(SystemExit):
            if main(told) == INTERNAL_ERROR:
                raise _Unexpected(err.getvalue().split("\n")[0])
        if not all(char.isprintable() or char == "\n" for char in out.getvalue() + err.getvalue()):
            raise _Unexpected("prints what steers a terminal")

    return run


def _round_trip(value: object, _: bytes, __: Path) -> None:
    assert isinstance(value, Document)
    if _spelled(stow.read(stow.write(value))) != _spelled(value):
        raise _Unexpected("is another document after a round trip")


def _spelled(document: Document) -> str:
    """All of a document in words: NaN is not equal to itself, and sets have no order."""
    return repr((_spelled_graph(document.graph), document.profile, document.notes))


def _spelled_graph(graph: Graph) -> str:
    return repr((graph.tensors, graph.ops, sorted(graph.held)))


def _training(value: object, _: bytes, __: Path) -> None:
    assert isinstance(value, Document)
    training_step_of(value.graph)


def _plan(value: object, _: bytes, __: Path) -> None:
    """Plans of few moves for a small graph, through their file and back."""
    assert isinstance(value, Document)
    graph = value.graph
    if len(graph.ops) > _MOST_OPS:
        return
    pricing = price_by_profile(graph, value.profile, {}) if value.profile else price_by_macs(graph)
    planner = planner_of(graph, pricing, options=PlanOptions(search=Search(moves=_MOVES)))
    offers = planner.tradeoffs()
    plan = planner.plan(offers[0].peak_bytes)
    read = plan_file.read(plan_file.write(plan))
    same_graph = _spelled_graph(read.graph) == _spelled_graph(plan.graph)
    if not same_graph or replace(read.draft(), graph=plan.graph) != plan.draft():
        raise _Unexpected("is another plan after a round trip")


_REPORTS = {
    f"report {suffix}": _verb("report", "FILE", "-o", f"OUT{suffix}")
    for suffix in (".html", ".csv", ".svg", ".json.gz")
}
_SHOWN: Mapping[str, Action] = {**_REPORTS, "compare": _verb("compare", "FILE", "FILE")}
_OF_DOCUMENTS: Mapping[str, Action] = {
    **_SHOWN,
    "inspect": _verb("inspect", "FILE", "--notes"),
    "inspect --json": _verb("inspect", "FILE", "--json"),
    "inspect --training": _verb("inspect", "FILE", "--training", "--json"),
    "convert": _verb("convert", "FILE", "OUT.stow.json"),
    "convert --graph-only": _verb("convert", "FILE", "OUT.stow.txt", "--graph-only"),
    "simulate": _verb("simulate", "FILE", "--mesh", "data=2", "--up-to", "4", "--json"),
    "explain": _verb("explain", "FILE"),
    "round trip": _round_trip,
    "training": _training,
    "plan": _plan,
}
_OF_PLANS: Mapping[str, Action] = {
    **_SHOWN,
    "explain": _verb("explain", "FILE"),
    "explain --json": _verb("explain", "FILE", "--json"),
    "explain TENSOR": _verb("explain", "FILE", "x"),
}


# The kinds


def _text_kind(reader: Reader) -> Kind:
    def read(data: bytes, _: Path) -> object:
        return reader.read(decoded(data))

    damage = _BY_STRUCTURE.get(reader.FORMAT)
    return Kind(reader.FORMAT, _samples(reader.FORMAT), read, damage and _on_text(damage), _OF_DOCUMENTS)


_BY_STRUCTURE: Mapping[str, Callable[[str, Random], str]] = {
    "stow": damaged_stow,
    "text": damaged_graph,
    "chainer": damaged_lines,
    "megengine": damaged_json,
    "torch_trace": damaged_json,
}


def _binary_kind(reader: BinaryReader) -> Kind:
    def read(data: bytes, _: Path) -> object:
        return reader.read(data)

    damage = damaged_protobuf if reader.FORMAT == "onnx" else damaged_pickle
    return Kind(reader.FORMAT, _samples(reader.FORMAT), read, damage, _OF_DOCUMENTS)


def _samples(name: str) -> tuple[bytes, ...]:
    found = [path.read_bytes() for path in sorted(SAMPLES.glob(f"{name}*"))]
    if name == graphtext.FORMAT:  # a whole training step besides, on which plans have something to decide
        (step,) = _samples(chainer.FORMAT)
        found.append(graphtext.write(chainer.read(step.decode())).encode())
    return tuple(found)


def _on_text(damage: Callable[[str, Random], str]) -> Damage:
    return lambda data, random: damage(data.decode(), random).encode("utf-8", errors="surrogatepass")


def _plan_texts() -> Iterator[str]:
    """Plans of the small documents: one that recomputes, one without a backward half, one in tiles."""
    for reader, tight in ((READERS[-1], True), (READERS[1], False)):
        (sample, *_) = _samples(reader.FORMAT)
        graph = reader.read(sample.decode()).graph
        planner = planner_of(graph, price_by_macs(graph), options=PlanOptions(search=Search(moves=_MOVES)))
        offers = planner.tradeoffs()
        yield plan_file.write(planner.plan(offers[0 if tight else -1].peak_bytes))


def _sealed_kinds() -> Iterator[Kind]:
    plans = tuple(_plan_texts())
    sealed = _on_text(damaged_sealed)

    def load_plan(data: bytes, _: Path) -> object:
        return plan_file.read(decoded(data))

    def read_record(data: bytes, _: Path) -> object:
        return record_file.read(decoded(data))

    yield Kind("plan", tuple(map(str.encode, plans)), load_plan, sealed, _OF_PLANS)
    worst = (Difference("w", 1e-9, 1.0, 1e-6),)
    record = Record(plan_file.read(plans[0]), "cpu", (0, 64, 0), (0.0, 0.5, 1.0), 1.5, 128, 1.25, worst)
    yield Kind("record", (record_file.write(record).encode(),), read_record, sealed, _SHOWN)


def _small_kinds() -> Iterator[Kind]:
    """Files that options of verbs name, and the cache of probes."""
    peers = json.dumps({"peers": [{"name": "a", "peak_bytes": 64, "time_ratio": 1.5}], "more": [1, {"x": 2}]})
    machine = "[compute]\nmacs_per_second = 2e10\nlaunch_seconds = 1e-6\n[network]\nlatency_seconds = 1e-5\n"

    def machine_of(data: bytes, folder: Path) -> object:
        (folder / "machine.toml").write_bytes(data)
        return read_machine(str(folder / "machine.toml"))

    def simulate(_: object, __: bytes, folder: Path) -> None:
        sample = str(SAMPLES / "chainer.txt")
        options = ("--mesh", "data=2", "--up-to", "2", "--json", "--machine", str(folder / "machine.toml"))
        _verb("simulate", sample, *options)(None, b"", folder)

    def peers_of(data: bytes, _: Path) -> object:
        return read_peers(decoded(data))

    damage = _on_text(damaged_json)
    yield Kind("peers", (peers.encode(),), peers_of, damage, {})
    yield Kind("machine", (machine.encode(),), machine_of, None, {"simulate": simulate}, is_quiet=False)
    yield _probe_kind()


def _probe_kind() -> Kind:
    here = Platform("a cpu", "cpu", "2.13.0", 1, "AVX2")
    with tempfile.TemporaryDirectory() as name:
        ProbeCache(Path(name)).add(here, {"mm": Cost(0.5, 64)}, Machine(), {"disk": (1e9, 1e9, 1e-4)})
        (file,) = Path(name).iterdir()
        sample, called = file.read_bytes(), file.name

    def read(data: bytes, folder: Path) -> object:
        (folder / called).write_bytes(data)
        found = ProbeCache(folder).read(here)
        figures = [cost.seconds for cost in found.costs.values()] + [
            rate for r in found.tiers.values() for rate in r
        ]
        if not all(0 <= figure < 1e31 for figure in figures):
            raise _Unexpected(f"believes {figures}")
        return found

    return Kind(
        "probe_cache",
        (sample,),
        read,
        _on_text(partial(damaged_sealed, content="findings")),
        {},
        is_quiet=False,
    )


def _plan_cache_kind() -> Kind:
    """Entries of the plan cache for the step of a small model; needs PyTorch."""
    import torch
    from torch import nn

    from stowplan.capture import capture
    from stowplan.run.planning.plan_cache import PlanCache
    from stowplan.run.planning.planner import Subject

    model, args = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), (torch.ones(2, 4),)
    captured = capture(model, args, loss=torch.sum)
    subject = Subject(captured, model, args, {})
    plan = planner_of(
        captured.graph, price_by_macs(captured.graph), options=PlanOptions(search=Search(moves=_MOVES))
    ).plan(2**20)

    def read(data: bytes, folder: Path) -> object:
        (folder / "key.plan.json").write_bytes(data)
        return PlanCache(folder).read("key", subject, 2**20)

    sample = plan_file.write(plan).encode()
    return Kind("plan_cache", (sample,), read, _on_text(damaged_sealed), {}, is_quiet=False)


@cache
def kinds() -> Mapping[str, Kind]:
    """All kinds by name."""
    found = [
        *map(_text_kind, READERS),
        *map(_binary_kind, BINARY_READERS),
        *_sealed_kinds(),
        *_small_kinds(),
    ]
    with suppress(ImportError):
        found.append(_plan_cache_kind())
    with tempfile.TemporaryDirectory() as folder:
        for kind in found:  # whatever reading imports is imported now
            for sample in kind.samples:
                kind.read(sample, Path(folder))
    return {kind.name: kind for kind in found}


# Batches in children


def tally_of(kind: Kind, seeds: Iterable[int]) -> Tally:
    """Judge cases in this process."""
    counts: Counter[str] = Counter()
    findings: list[tuple[str, int, Verdict]] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            data, action = drawn(kind, seed)
            verdict = judged(kind, data, action, Path(folder))
            counts[verdict.outcome] += 1
            if verdict.outcome not in GOOD:
                findings.append((kind.name, seed, verdict))
    spent: Counter[str] = Counter()
    spent[kind.name] = time.process_time() - began  # type: ignore[assignment]
    return Tally({kind.name: counts}, spent, findings)


def batch(kind: Kind, seeds: Sequence[int]) -> Tally:
    """Judge cases in a child of bounded memory; one that dies of a case is a finding too."""
    tally = _in_a_child(partial(tally_of, kind, seeds))
    if tally is not None:
        return tally
    if len(seeds) == 1:
        died = Verdict("large", "read", "the process died")
        return Tally({kind.name: Counter(large=1)}, findings=[(kind.name, seeds[0], died)])
    middle = len(seeds) // 2
    whole = batch(kind, seeds[:middle])
    whole.add(batch(kind, seeds[middle:]))
    return whole


def _in_a_child(work: Callable[[], Tally]) -> Tally | None:
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(work, there))
    child.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = None
    child.join()
    return found if isinstance(found, Tally) else None


def _send(work: Callable[[], Tally], there: Connection) -> None:
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MOST_BYTES, resource.RLIM_INFINITY))
    there.send(work())
    there.close()
    os._exit(0)


# Findings


def shrunk(kind: Kind, data: bytes, verdict: Verdict) -> bytes:
    """A smaller file with the same verdict: pieces are taken out while that lasts."""
    ends = time.monotonic() + _SHRINKING_SECONDS
    action = None if verdict.action == "read" else verdict.action
    size = max(1, len(data) // 2)
    with tempfile.TemporaryDirectory() as folder:
        while size and time.monotonic() < ends:
            at = 0
            while at < len(data) and time.monotonic() < ends:
                shorter = data[:at] + data[at + size :]
                found = judged(kind, shorter, action, Path(folder))
                if (found.outcome, found.where) == (verdict.outcome, verdict.where):
                    data = shorter
                else:
                    at += size
            size //= 2
    return data


def told(kind: Kind, seed: int, verdict: Verdict, keep: Path) -> str:
    """One finding: what it is, the command that repeats it, and its file, made small."""
    data = drawn(kind, seed)[0]
    small = data if verdict.outcome in ("slow", "large") else shrunk(kind, data, verdict)
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{kind.name}-{seed}"
    path.write_bytes(small)
    return (
        f"{verdict.outcome} in {verdict.action} at {verdict.where}: {verdict.what}\n"
        f"  python -m tests.hunt.files --kind {kind.name} --seed {seed} --count 1\n"
        f"  {path}: {len(small)} of {len(data)} bytes"
    )


def hunt(names: Sequence[str], first: int, *, seconds: float | None, count: int | None) -> Tally:
    """Rounds of a batch of each kind, for so long or so many cases of each."""
    whole, ends, seed = Tally(), None if seconds is None else time.monotonic() + seconds, first
    while count is None or seed < first + count:
        size = _BATCH if count is None else min(_BATCH, first + count - seed)
        for name in names:
            whole.add(batch(kinds()[name], range(seed, seed + size)))
            if ends is not None and time.monotonic() > ends:
                return whole
        seed += size
    return whole


def table(tally: Tally) -> str:
    """Counts by kind."""
    heads = ("cases", *GOOD, *BAD, "per second")
    lines = [f"{'kind':16}" + "".join(f"{head:>12}" for head in heads)]
    for name, counts in sorted(tally.outcomes.items()):
        cases = sum(counts.values())
        figures = (cases, *(counts[outcome] for outcome in (*GOOD, *BAD)))
        rate = cases / (tally.seconds[name] or 1e-9)
        lines.append(f"{name:16}" + "".join(f"{figure:12,}" for figure in figures) + f"{rate:12,.0f}")
    total = sum(tally.outcomes.values(), Counter[str]())
    figures = (tally.cases, *(total[outcome] for outcome in (*GOOD, *BAD)))
    return "\n".join([*lines, f"{'all':16}" + "".join(f"{figure:12,}" for figure in figures)])


def run(words: Sequence[str]) -> int:
    """Hunt as the command line says; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt.files", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, help="how long to hunt (default 60, or as --count says)")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case of each kind")
    parser.add_argument("--count", type=int, help="how many cases of each kind")
    parser.add_argument("--kind", action="append", choices=tuple(kinds()), help="only these kinds")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "stowplan-findings")
    arguments = parser.parse_args(words)
    seconds = 60.0 if arguments.seconds is None and arguments.count is None else arguments.seconds
    found = hunt(arguments.kind or tuple(kinds()), arguments.seed, seconds=seconds, count=arguments.count)
    print(table(found))
    seen: Counter[tuple[str, str, str]] = Counter()
    for name, seed, verdict in found.findings:
        seen[name, verdict.outcome, verdict.where] += 1
        if seen[name, verdict.outcome, verdict.where] == 1:
            print(told(kinds()[name], seed, verdict, arguments.keep))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"{tally_line(found)}; largest child {peak / 2**10:.0f} MiB")
    return 1 if found.findings else 0


def tally_line(tally: Tally) -> str:
    """Everything in one line."""
    total = sum(tally.outcomes.values(), Counter[str]())
    return f"{tally.cases:,} cases, " + ", ".join(f"{total[outcome]} {outcome}" for outcome in BAD)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
