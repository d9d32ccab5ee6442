"""Planted faults: how many of them do the tests see? `python -m benchmarks.mutate`.

Each mutant is one small change to one file: a comparison turned, an arithmetic sign flipped, a condition
negated, `and` for `or`, a constant off by one, a statement or a body left out. It is written into a copy of
the source, never into the tree, and the subject's own tests run against the copy up to the first that fails,
each time in a fork of a process that has imported all slow modules except stowplan. The seed determines which
mutants are drawn.
"""

import argparse
import ast
import copy
import importlib
import multiprocessing
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Subject:
    """Files that answer one question, and the tests that hold their answers, the fastest first."""

    name: str
    files: tuple[str, ...]
    tests: tuple[str, ...]


SUBJECTS = (
    Subject(
        "judge",
        ("plan/judge/*.py",),
        ("tests/plan/test_verify.py", "tests/plan/test_simulate.py", "tests/plan/test_ledger.py"),
    ),
    Subject(
        "regions",
        ("ops/regions/*.py",),
        ("tests/ops/test_region_rules.py", "tests/ops/test_regions.py", "tests/ops/test_region_documents.py"),
    ),
)
_IMPORTED_ONCE = ("pytest", "hypothesis.strategies", "numpy", "scipy.optimize", "msgspec", "torch")
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_FLIPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one file, and what it is."""

    file: str
    line: int
    what: str
    source: str


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Every change there is to make, one at a time."""
    tree = ast.parse(source)
    for position, node in enumerate(ast.walk(tree)):
        for what in _changes(node):
            changed = copy.deepcopy(tree)
            target = next(found for at, found in enumerate(ast.walk(changed)) if at == position)
            _apply(target, what)
            line = getattr(node, "lineno", 0)
            yield Mutant(file, line, what, ast.unparse(ast.fix_missing_locations(changed)))


def _changes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _TURNED:
        yield "comparison turned"
    elif isinstance(node, ast.BinOp) and type(node.op) in _FLIPPED:
        yield "operator flipped"
    elif isinstance(node, ast.If | ast.IfExp) and not _turns_round(node.test):
        yield "condition negated"
    elif isinstance(node, ast.BoolOp):
        yield "and for or"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant plus one"
    elif isinstance(node, ast.Expr | ast.AugAssign) and not _is_docstring(node):
        yield "statement left out"
    if isinstance(node, ast.If | ast.For):
        yield "body left out"


def _turns_round(test: ast.expr) -> bool:
    """Whether the test is a comparison whose turn is its negation: that mutant is there already."""
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) not in _ORDERS


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _apply(node: ast.AST, what: str) -> None:
    match node:
        case ast.If() | ast.For() if what == "body left out":
            node.body = [ast.Pass()]
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.Compare():
            node.ops[0] = _TURNED[type(node.ops[0])]()
        case ast.BinOp():
            node.op = _FLIPPED[type(node.op)]()
        case ast.If() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant():
            assert isinstance(node.value, int)
            node.value += 1
        case ast.Expr():
            node.value = ast.Constant(None)
        case ast.AugAssign():
            node.value, node.op = ast.Constant(0), ast.Add()
        case _:
            raise AssertionError(what)


def is_seen(mutant: Mutant, folder: Path, tests: Sequence[str], seconds: float) -> bool:
    """Whether the tests fail, or hang, with the mutant in place of its file."""
    path = folder / "stowplan" / mutant.file
    original = path.read_bytes()
    path.write_text(mutant.source, encoding="utf-8")
    try:
        return not _pass(folder, tests, seconds)
    finally:
        path.write_bytes(original)


def _pass(folder: Path, tests: Sequence[str], seconds: float) -> bool:
    child = multiprocessing.get_context("fork").Process(target=_run, args=(folder, tests))
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode == 0


def _run(folder: Path, tests: Sequence[str]) -> None:
    """In the child: pytest on a stowplan that nothing has imported yet."""
    import pytest

    os.chdir(ROOT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    early = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis is there before pytest asks for it
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", early, *tests]))


def main() -> int:
    """Draw, plant, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=60, help="how many mutants of each subject")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which a mutant counts as seen")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    arguments = parser.parse_args()
    with warnings.catch_warnings(action="ignore"):
        for name in _IMPORTED_ONCE:
            importlib.import_module(name)
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "src" / "stowplan", folder / "stowplan")
        for subject in SUBJECTS:
            if arguments.only in subject.name:
                _report(subject, folder, arguments)
    return 0


def _report(subject: Subject, folder: Path, arguments: argparse.Namespace) -> None:
    package = folder / "stowplan"
    files = sorted(path for pattern in subject.files for path in package.glob(pattern))
    everything = [
        mutant
        for path in files
        for mutant in mutants_of(str(path.relative_to(package)), path.read_text(encoding="utf-8"))
    ]
    drawn = Random(arguments.seed).sample(everything, min(arguments.sample, len(everything)))
    assert _pass(folder, subject.tests, 600), f"the tests of {subject.name} fail without a fault"
    unseen = 0
    for mutant in drawn:
        if not is_seen(mutant, folder, subject.tests, arguments.seconds):
            unseen += 1
            print(f"  unseen: {mutant.file}:{mutant.line}: {mutant.what}", flush=True)
    print(
        f"{subject.name}: {len(drawn) - unseen} of {len(drawn)} seen, drawn from {len(everything)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
