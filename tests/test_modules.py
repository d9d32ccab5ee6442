"""A module has one subject: one docstring, imports at its top, and no ring of imports with others.

Two docstrings, or imports after other code, are what remains where two modules were put into one file. In a
ring, modules import each other, be it within functions: none of them can be read, or taken out, alone.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.test_layers import is_for_types, modules

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "tools", "examples", "docs")


@cache
def parsed() -> Mapping[str, ast.Module]:
    return dict(modules())


@cache
def files() -> Mapping[str, ast.Module]:
    """All Python files of the repository by path."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def is_text(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def second_docstrings(tree: ast.Module) -> list[int]:
    """The lines of texts that neither open the module nor follow what they are about: an assignment."""
    follows = zip(tree.body, tree.body[1:], strict=False)
    return [
        node.lineno
        for before, node in follows
        if is_text(node) and not isinstance(before, ast.Assign | ast.AnnAssign)
    ]


def late_imports(tree: ast.Module) -> list[int]:
    """The lines of imports after other code of the module. What only types need may come after imports."""
    code = False
    lines = []
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom) or is_for_types(node):
            lines += [node.lineno] if code else []
        elif not (number == 0 and is_text(node)) and not comes_before_imports(node):
            code = True
    return lines


def comes_before_imports(node: ast.stmt) -> bool:
    """What decides whether, or from where, the rest can be imported."""
    text = ast.unparse(node) if isinstance(node, ast.Expr | ast.Assign) else ""
    return "importorskip(" in text or text.startswith(("sys.path.", "pytest.register_assert_rewrite("))


@pytest.mark.slow
def test_a_module_has_one_docstring() -> None:
    assert not [f"{path}:{line}" for path, tree in files().items() for line in second_docstrings(tree)]


@pytest.mark.slow
def test_imports_stand_at_the_top() -> None:
    assert not [f"{path}:{line}" for path, tree in files().items() for line in late_imports(tree)]


_GLUED = """\
'One.'
import a
X = 1
'Of X.'

'Two.'
import b
if TYPE_CHECKING:
    import c
"""
_WHOLE = """\
'One.'
import a
if TYPE_CHECKING:
    import c
X: int = 1
'Of X.'
def f():
    import b
"""


def test_the_checks_see_a_glued_module() -> None:
    glued, whole = ast.parse(_GLUED), ast.parse(_WHOLE)
    assert second_docstrings(glued) == [6]
    assert late_imports(glued) == [7, 8]
    assert second_docstrings(whole) == late_imports(whole) == []


def runs(tree: ast.AST) -> Iterator[ast.AST]:
    """All that a module may run, in functions too: without what only types need."""
    for node in ast.iter_child_nodes(tree):
        if is_for_types(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield from (other, *runs(other))
        else:
            yield node
            yield from runs(node)


def imported_by(tree: ast.AST, known: Mapping[str, object]) -> set[str]:
    """The known modules that a module imports, at its top or later."""
    found: set[str] = set()
    for node in runs(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in known else str(node.module) for name in inner.values())
    return found & known.keys()


def rings(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Each largest set of modules of which every one leads to every other."""
    reached = {name: reachable(name, imports) for name in imports}
    sets = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
    return [set(ring) for ring in sets if ring]


def reachable(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(imports[name])
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += imports[module]
    return found


@pytest.mark.slow
def test_no_imports_run_in_a_ring() -> None:
    known = parsed()
    imports = {name: imported_by(tree, known) - {name} for name, tree in known.items()}
    found = [" <-> ".join(sorted(ring)) for ring in rings(imports)]
    assert not found, "\n".join(found)


def test_the_check_sees_a_ring_of_lazy_imports() -> None:
    trees = {
        "p.a": ast.parse("from p import b"),
        "p.b": ast.parse("def f():\n  from p.c import thing"),
        "p.c": ast.parse("def f():\n  import p.a\nif TYPE_CHECKING:\n  import p.d"),
        "p.d": ast.parse("import p.a"),
    }
    imports = {name: imported_by(tree, trees) for name, tree in trees.items()}
    assert rings(imports) == [{"p.a", "p.b", "p.c"}]


def test_a_public_name_stands_for_one_class() -> None:
    """Who reads `Level` in a file need not look which of several it is."""
    homes: dict[str, list[str]] = {}
    for name, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}
