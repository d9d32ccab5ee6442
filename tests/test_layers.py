"""Imports point one way, and torch stays at the edges."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stowplan

SOURCE = Path(stowplan.__file__).parent
ROOT = Path(__file__).parents[1]

# Tests of the benchmarks and examples themselves; all others take what they share from `tests.support`.
MAY_IMPORT = {
    "benchmarks": {
        "tests/test_benchmarks.py",
        "tests/test_databases.py",
        "tests/test_tools.py",
        "tests/test_zoo.py",
    },
    "examples": {"tests/integrations/test_integrations.py", "tests/techniques/shards/run/test_torchrun.py"},
}

# Each line may import from the lines above it; parts on one line do not import each other.
LAYERS = (
    ("interrupts",),
    ("alone", "errors"),
    ("units", "geometry", "torch_private", "demo", "watch"),
    ("ir",),
    ("ops",),
    ("formats", "capture", "analyse"),
    ("plan",),
    ("request",),
    ("run",),
    ("techniques",),  # whose planning may import what `plan` may, and whose running what `run` may
    ("observe",),
    ("report",),
    ("api",),
    ("integrations",),
    ("cli",),
    ("__main__",),
)
_DEFINED = re.compile(r'library\.(?:custom_op|define)\(\s*"(stowplan::\w+)"')
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
TORCH_PARTS = ("torch_private", "demo", "capture", "run", "observe", "integrations")


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package by dotted name, parsed."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(("stowplan", *path.relative_to(SOURCE).with_suffix("").parts))
        yield name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))


def imports_of(module: str, tree: ast.Module, *, relative: bool = False) -> Iterator[str]:
    """Dotted names a module imports, at its top and inside its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert relative or node.level == 0, f"{module} uses a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str:
    """The layer entry a dotted name belongs to; "" for the package itself.

    The planning of a technique may import what `plan` may, and its running what `run` may.
    """
    parts = name.split(".")
    if parts[1:2] == ["techniques"]:
        return parts[3] if len(parts) > 3 else ""
    return parts[1] if len(parts) > 1 else ""


# Who names a technique: commands and reports that are about one, and what a user imports of it.
MAY_NAME = {
    "stowplan.cli.simulate": "shards",
    "stowplan.run.shards.checkpoints": "shards",
    "stowplan.report.simulate": "shards",
}


def technique_of(name: str) -> str:
    """The technique that a dotted name is of, or ""."""
    parts = name.split(".")
    return parts[2] if parts[1:2] == ["techniques"] and len(parts) > 2 else ""


def faults(module: str, imported: str) -> Iterator[str]:
    """What is wrong with one import, if anything."""
    package, here, there = imported.partition(".")[0], part_of(module), part_of(imported)
    if package == "torch" and not is_torch_edge(module):
        yield f"{module} imports {imported}: torch stays in {', '.join(TORCH_PARTS)}, torch-named formats"
    if package == "stowplan" and here and there != "__version__":
        if there not in LEVEL:
            yield f"{module} imports {imported}, which has no layer"
        elif here != there and LEVEL[there] >= LEVEL[here]:
            yield f"{module} imports {imported}, which is not below it"


def is_torch_edge(module: str) -> bool:
    return part_of(module) in TORCH_PARTS or module.startswith("stowplan.formats.torch")


@pytest.mark.slow
def test_every_module_has_a_layer() -> None:
    parts = {part_of(name) for name, _ in modules()} - {""}
    assert parts <= LEVEL.keys()


@pytest.mark.slow
def test_imports_point_down_the_layers() -> None:
    found = [
        fault
        for name, tree in modules()
        for imported in imports_of(name, tree)
        for fault in faults(name, imported)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("stowplan.ir.graph", "stowplan.formats.stow"),
        ("stowplan.formats.chainer", "stowplan.analyse.facts_of"),
        ("stowplan.geometry", "stowplan.units.parse_bytes"),
        ("stowplan.formats.stow", "torch"),
        ("stowplan.plan.solve", "torch.nn"),
        ("stowplan.ops.effects", "stowplan.helpers.all"),
    ],
)
def test_the_check_itself_sees_a_wrong_import(module: str, imported: str) -> None:
    assert list(faults(module, imported))


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("stowplan.capture.step", "torch"),
        ("stowplan.formats.torch_export", "torch.fx"),
        ("stowplan.cli.inspect", "stowplan.api.inspect"),
        ("stowplan.formats.door", "stowplan.formats.stow"),
    ],
)
def test_the_check_itself_allows_a_right_import(module: str, imported: str) -> None:
    assert not list(faults(module, imported))


@pytest.mark.slow
def test_no_two_modules_define_one_op() -> None:
    """PyTorch would take the later definition for both."""
    texts = (path.read_text() for path in SOURCE.rglob("*.py"))
    defined = [name for text in texts for name in _DEFINED.findall(text)]
    assert "stowplan::begin_gather" in defined
    assert len(set(defined)) == len(defined)


def test_no_technique_is_on_the_general_road() -> None:
    """They are found by the sockets, so that a folder can be deleted; types may name them."""
    wrong = [
        f"{module} imports {imported}"
        for module, tree in modules()
        for imported in imports_of(module, without_type_checking(tree))
        if (technique := technique_of(imported))
        and technique != technique_of(module)
        and MAY_NAME.get(module) != technique
    ]
    assert not wrong, "\n".join(wrong)


def without_type_checking(tree: ast.Module) -> ast.Module:
    """The module without what only a type checker sees."""
    return ast.Module([node for node in tree.body if not is_for_types(node)], [])


def is_for_types(node: ast.AST) -> bool:
    """Whether a statement is an `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_tests_share_through_support_alone() -> None:
    """Benchmarks and examples import from `tests.support`, never the other way round."""
    wrong = [
        f"{path} imports {imported}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for imported in imports_of(path.name, ast.parse(path.read_text(encoding="utf-8")), relative=True)
        if str(path.relative_to(ROOT)) not in MAY_IMPORT.get(package := imported.partition(".")[0], ())
        and package in MAY_IMPORT
    ]
    assert not wrong, "\n".join(wrong)


def loaded_by(code: str) -> set[str]:
    """The top-level modules in sys.modules after a fresh interpreter ran `code`."""
    report = "\nimport sys\nprint('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    assert not loaded_by("import stowplan") & {"torch", "numpy", "rich", "scipy"}


@pytest.mark.slow
def test_reading_a_file_loads_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "empty.stow.txt"
    path.write_text("stowplan graph 1\n")
    for words in (
        ["--version"],
        ["inspect", str(path)],
        ["convert", str(path), str(tmp_path / "x.stow.json")],
    ):
        code = f"from stowplan.cli.main import main\ntry: main({words!r})\nexcept SystemExit: pass"
        assert not loaded_by(code) & {"torch", "scipy"}


def test_a_verb_that_is_not_called_is_not_loaded() -> None:
    code = "from stowplan.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert not loaded_by(code) & {"torch", "numpy", "rich", "scipy", "msgspec"}
