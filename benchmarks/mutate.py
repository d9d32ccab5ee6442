"""Planted faults: how many of them do the tests see? `python -m benchmarks.mutate --sample 40`.

Each mutant is one small change to one module: a comparison turned, an arithmetic sign flipped, a condition
negated, a constant off by one, a statement left out. It is written into a copy of the source, never into the
tree, and the module's own tests run against the copy. Which mutants are drawn follows from the seed alone.
"""

import argparse
import ast
import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SUBJECTS = {
    "plan/verify.py": ("tests/plan/test_verify.py",),
    "plan/simulate.py": (
        "tests/plan/test_verify.py",
        "tests/plan/test_ledger.py",
        "tests/plan/test_plan_timeline.py",
    ),
    "ops/regions/maps.py": ("tests/ops",),
    "ops/regions/relation.py": ("tests/ops",),
    "ops/regions/windowed.py": ("tests/ops",),
}
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
_FLIPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one module, and what it is."""

    module: str
    line: int
    what: str
    source: str


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    """Every change there is to make, one at a time."""
    tree = ast.parse(source)
    for position, node in enumerate(ast.walk(tree)):
        for what in _changes(node):
            changed = copy.deepcopy(tree)
            target = next(found for at, found in enumerate(ast.walk(changed)) if at == position)
            _apply(target, what)
            yield Mutant(
                module, getattr(node, "lineno", 0), what, ast.unparse(ast.fix_missing_locations(changed))
            )


def _changes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _TURNED:
        yield "comparison turned"
    elif isinstance(node, ast.BinOp) and type(node.op) in _FLIPPED:
        yield "operator flipped"
    elif isinstance(node, ast.If | ast.IfExp):
        yield "condition negated"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "constant plus one"
    elif isinstance(node, ast.Expr | ast.AugAssign) and not _is_docstring(node):
        yield "statement left out"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _apply(node: ast.AST, what: str) -> None:
    match node:
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
    """Whether the tests fail, or hang, with the mutant in place of its module."""
    path = folder / "stowplan" / mutant.module
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        return not _pass(folder, tests, seconds)
    finally:
        path.write_text(original, encoding="utf-8")


def _pass(folder: Path, tests: Sequence[str], seconds: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    """Draw, plant, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=40, help="how many mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which a mutant counts as seen")
    parser.add_argument("--only", default="", help="modules whose path contains this")
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "src" / "stowplan", folder / "stowplan")
        for module, tests in SUBJECTS.items():
            if arguments.only in module:
                _report(module, tests, folder, arguments)
    return 0


def _report(module: str, tests: Sequence[str], folder: Path, arguments: argparse.Namespace) -> None:
    everything = list(mutants_of(module, (folder / "stowplan" / module).read_text(encoding="utf-8")))
    drawn = Random(arguments.seed).sample(everything, min(arguments.sample, len(everything)))
    assert _pass(folder, tests, 600), f"the tests of {module} fail without a fault"
    unseen = [mutant for mutant in drawn if not is_seen(mutant, folder, tests, arguments.seconds)]
    print(f"{module}: {len(drawn) - len(unseen)} of {len(drawn)} seen, drawn from {len(everything)}")
    for mutant in unseen:
        print(f"  unseen: line {mutant.line}: {mutant.what}")


if __name__ == "__main__":
    sys.exit(main())
