"""Documentation that is true: its code runs, its links lead somewhere, its folder list is the folders."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stowplan
from tests.support.snippets import program_of
from tests.test_layers import LEVEL

ROOT = Path(__file__).parents[1]
SOURCE = Path(stowplan.__file__).parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL_PAGES = [*PAGES, *sorted((ROOT / "docs/decisions").glob("*.md"))]
RUN = [page for page in PAGES if page.name not in ("report.md", "design.md")]  # of files not there


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


_LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.torch
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
@pytest.mark.slow
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-W", "error::DeprecationWarning:stowplan", "-c", program_of(page)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "page",
    [
        *ALL_PAGES,
        *(
            ROOT / f"{name}.md"
            for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "SUPPORT", "CODE_OF_CONDUCT")
        ),
    ],
    ids=lambda p: p.stem,
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
        is_shown = target.endswith((".md", ".png", ".svg")) or page.parent.name == "decisions"
        assert is_shown, f"{target}: the site has no page for it"


def _recipes() -> list[tuple[str, str]]:
    """The sections of the page of recipes, by title."""
    parts = re.split(r"^## (.*)$", _text("docs/how-to.md"), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


_ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")


@pytest.mark.parametrize("page", [*ALL_PAGES, ROOT / "README.md"], ids=lambda p: p.stem)
def test_links_into_pages_lead_to_headings(page: Path) -> None:
    for target, anchor in _ANCHOR.findall(page.read_text(encoding="utf-8")):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]


WRAPPED = [
    ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "SUPPORT", "CODE_OF_CONDUCT")
]


@pytest.mark.parametrize("page", [*ALL_PAGES, *WRAPPED], ids=lambda p: p.stem)
def test_no_line_of_a_page_is_too_long_to_read_in_a_diff(page: Path) -> None:
    """Rows of tables have to be one line."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    long = [number for number, line in lines if len(line) > 120 and not line.startswith("|")]
    assert long == [], "lines above 120 characters"


@pytest.mark.parametrize("section", _recipes(), ids=lambda section: section[0])
def test_a_recipe_is_at_most_a_screen(section: tuple[str, str]) -> None:
    assert len(section[1].split()) <= 350, "words"


def test_every_page_is_listed_and_most_titles_are_questions() -> None:
    listed = _text("docs/index.md")
    titles = {page.stem: page.read_text(encoding="utf-8").partition("\n")[0] for page in PAGES}
    assert [name for name in titles if name != "index" and f"]({name}.md)" not in listed] == []
    plain = {name for name, title in titles.items() if not title.endswith("?")}
    assert plain <= {"index", "reference", "benchmarks", "zoo"}  # whose programs write them


def test_the_page_of_dependencies_has_them_all() -> None:
    project = tomllib.loads(_text("pyproject.toml"))
    asked = {"all": project["project"]["dependencies"], "build": project["build-system"]["requires"]}
    asked |= {f"`[{name}]`": extra for name, extra in project["project"]["optional-dependencies"].items()}
    rows = re.findall(r"^\| ([\w-]+) \| (\S+) \| .+ \| .+ \|$", _text("docs/dependencies.md"), re.MULTILINE)
    found = {(re.split(r"[<>=]", one)[0], place) for place, several in asked.items() for one in several}
    assert found == {row for row in rows if row[0] != "package"}


def test_the_architecture_is_the_code() -> None:
    """The folder list of the design and the table of the contributor's guide name every part, in order."""
    parts = {
        path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    parts -= {"__init__"}
    listing = re.search(r"^src/stowplan/\n(.*?)^tests/", _text("docs/design.md"), re.MULTILINE | re.DOTALL)
    assert listing is not None
    named = re.findall(r"\b(\w+)(?:/|\.py)", "\n".join(line[:24] for line in listing[1].splitlines()))
    assert set(named) == parts
    table = re.findall(
        r"`(\w+)(?:/|\.py)`", _text("CONTRIBUTING.md").partition("| folder |")[2].partition("\n\n")[0]
    )
    assert set(table) == parts
    assert [part for part in named if part in table] == [part for part in table if part in named]
    assert [LEVEL[part] for part in named] == sorted(LEVEL[part] for part in named), "not as imports point"


def test_the_constraints_are_added_where_the_concepts_say() -> None:
    rows = re.findall(r"^\|.*\| `([\w/]+\.py)` \| `(\w+)` \|$", _text("docs/concepts.md"), re.MULTILINE)
    assert len(rows) >= 12
    for file, function in rows:
        assert f"def {function}(" in (SOURCE / file).read_text(encoding="utf-8"), (file, function)


def test_files_that_pages_name_exist() -> None:
    for page in ALL_PAGES:
        for file in re.findall(
            r"`((?:ir|ops|analyse|plan|run|report|formats|capture|cli)/[\w/]+\.py)`", page.read_text()
        ):
            assert (SOURCE / file).exists(), f"{page.name}: {file}"


_ROAD = """
import sys
import torch
from torch import nn
import stowplan


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())))

    def forward(self, x):
        return self.layers(x).square().mean()


ran = set()
sys.setprofile(lambda frame, event, _: ran.add(frame.f_code.co_filename) if event == "call" else None)
images = torch.randn(256, 64)
search = stowplan.Search(moves=50)
model = stowplan.fit(Network(), (images,), budget="900KB", allow=("recompute",), search=search)
model(images).backward()
sys.setprofile(None)
print(*ran, sep="\\n")
"""


@pytest.mark.torch
@pytest.mark.slow
def test_the_walk_is_the_road_of_an_untiled_fit(tmp_path: Path) -> None:
    """Each module that the contributor's walk names runs, and none of tiles, offload or shards is named."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _ROAD], env=environment, capture_output=True, text=True, check=True
    )
    walk = _text("CONTRIBUTING.md").partition("## A walk through `fit`")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", walk)
    assert len(named) >= 10
    assert not [name for name in named if str(SOURCE / name) not in done.stdout.splitlines()]
    assert not [name for name in named if {"tiles", "offload", "tiers", "shards"} & set(name.split("/"))]
