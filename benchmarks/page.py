"""The page of benchmarks, from what the studies have written: `python -m benchmarks.page`.

`build/bench/index.html` has every figure in plots and tables; `--docs` writes the same for the documentation,
with its pictures and a copy of the figures. There a section that people wrote stays as it is, such as "In
short", whose figures a test compares with those of the studies. `--section STUDY` writes one section of the
documentation and leaves the others as they are.
"""

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

import msgspec

from benchmarks.results import FOLDER, ROOT, Result, read_results
from benchmarks.sections import SECTIONS, Section
from stowplan.report.picture.shapes import svg_of_drawing
from stowplan.units import format_bytes, format_seconds

_DOCS = ROOT / "docs"
_TITLE = "How much memory and time do plans take, measured?"
_OPENING = (
    "The command under each table measured its figures, on the machine named there. Peaks are the "
    "allocator's own. Each round runs every method once; times are medians over rounds, with their "
    "quartiles. `make bench` runs everything, `make bench SIZE=short` a part in five minutes; both write "
    "this page at the end."
)
_STYLE = """
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: #fff; color: #1c2430;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color-scheme: light; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0; font-weight: 600; }
p, li { max-width: 46rem; } svg { max-width: 100%; height: auto; display: block; margin: .6rem 0; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid #e3e7ec; vertical-align: top; }
th { color: #5f6b7a; font-weight: 600; }
:is(td, th):nth-child(-n+2) { text-align: left; }
code { font-size: 12.5px; background: #f5f7fa; padding: .05rem .25rem; }
.by { color: #5f6b7a; font-size: 13px; }
"""


def html_of(results: Sequence[Result]) -> str:
    """One page without anything outside of it."""
    parts = [f"<h1>{_TITLE}</h1>", f"<p>{_marked(_OPENING)}</p>"]
    for section in _sections(results):
        parts += [
            f"<h2>{escape(section.title)}</h2>",
            *(f"<p>{_marked(words)}</p>" for words in section.words),
        ]
        for drawing in section.drawings:
            parts += [f"<h3>{escape(drawing.title)}</h3>", svg_of_drawing(drawing)]
        head, *rows = rows_of(section.results)
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f"<table><tr>{cells}</tr>{body}</table>")
        parts += [f'<p class="by">{_marked(line)}</p>' for line in _origins(section.results)]
    meta = f'<meta charset="utf-8"><title>{_TITLE} - stowplan</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{meta}</head><body>{"".join(parts)}</body></html>\n'


def markdown_of(results: Sequence[Result]) -> tuple[str, dict[str, str]]:
    """The page for the documentation, and its pictures by name."""
    lines, pictures = [f"# {_TITLE}", "", _filled(_OPENING), ""], dict[str, str]()
    for section in _sections(results):
        lines += [
            f"## {section.title}",
            "",
            *(line for words in section.words for line in (_filled(words), "")),
        ]
        for number, drawing in enumerate(section.drawings, 1):
            name = f"bench-{section.study}-{number}.svg"
            pictures[name] = svg_of_drawing(drawing)
            lines += [f"![{drawing.title}](pictures/{name})", ""]
        head, *rows = rows_of(section.results)
        lines += [_row(head), "|---" * len(head) + "|", *map(_row, rows), ""]
        lines += [line for origin in _origins(section.results) for line in (_filled(origin), "")]
    return "\n".join(lines).rstrip() + "\n", pictures


def with_section(page: str, text: str) -> str:
    """A page of the documentation with one section as in `text`: in its place, or before the second one."""
    _, mark, section = text.partition("\n## ")
    title = section.partition("\n")[0]
    head, *sections = page.rstrip("\n").split(mark)
    titles = [each.partition("\n")[0] for each in sections]
    place = titles.index(title) if title in titles else min(1, len(sections))
    sections[place : place + (title in titles)] = [section.rstrip("\n") + "\n"]
    return mark.join((head, *sections)).rstrip("\n") + "\n"


def with_others(text: str, page: str) -> str:
    """A new page of the documentation, with the sections of the page before that no study writes."""
    mark = "\n## "
    written = {section.partition("\n")[0] for section in text.split(mark)[1:]}
    sections = page.rstrip("\n").split(mark)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    parts = text.rstrip("\n").split(mark)
    for place, (title, section) in enumerate(zip(titles, sections, strict=True), 1):
        if title not in written:
            parts.insert(place, section.rstrip("\n") + "\n")
    return mark.join(parts).rstrip("\n") + "\n"


def write_section(study: str, results: Path = FOLDER) -> None:
    """Write what a study has found so far into the documentation, with its pictures and figures."""
    found = [result for result in read_results(results) if result.study == study]
    text, pictures = markdown_of(found)
    page, figures = _DOCS / "benchmarks.md", _DOCS / "benchmarks.jsonl"
    page.write_text(with_section(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    for name, picture in pictures.items():
        (_DOCS / "pictures" / name).write_text(picture, encoding="utf-8")
    others = [result for result in read_results(figures) if result.study != study]
    figures.write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in (*others, *found)))


def rows_of(results: Sequence[Result]) -> list[list[str]]:
    """A row for each method and case, a column for each figure; the first row names them."""
    figures = list(dict.fromkeys(result.figure for result in results))
    rows: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        rows.setdefault((result.case, result.way), {})[result.figure] = result
    table, before = [["case", "method", *figures]], ""
    for (case, way), row in rows.items():
        table.append(
            ["" if case == before else case, way, *(told(row[f]) if f in row else "" for f in figures)]
        )
        before = case
    return table


def told(result: Result) -> str:
    """A figure in its unit, with its quartiles."""
    ends = [format_seconds(end) if result.unit == "s" else f"{end:.3f}" for end in result.spread or ()]
    spread = f" ({' to '.join(ends)})" if ends else ""
    match result.unit:
        case "B":
            return format_bytes(round(result.value))
        case "s":
            return format_seconds(result.value) + spread
        case "ops":
            return f"{result.value:,.0f}"
        case "of measured" | "of the bound":
            return f"{result.value:+.2%}"
        case _:
            return f"{result.value:.3f}{spread}"


def _sections(results: Sequence[Result]) -> Iterator[Section]:
    for study, build in SECTIONS.items():
        of_study = [result for result in results if result.study == study]
        if of_study:
            yield build(of_study)


def _origins(results: Sequence[Result]) -> Iterator[str]:
    """By which commands, on what, when."""
    for command in dict.fromkeys(result.command for result in results):
        last = [result for result in results if result.command == command][-1]
        yield f"`{command}`: torch {last.torch}, {last.machine}, {last.when[:16].replace('T', ' ')}"


_filled = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
"""Text of the documentation, in lines of at most 120 characters."""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _marked(words: str) -> str:
    """Words with `code` as HTML."""
    parts = escape(words).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER, help="the folder with the figures")
    parser.add_argument("--docs", action="store_true", help="write docs/benchmarks.md as well")
    parser.add_argument(
        "--section", metavar="STUDY", help="only the section of this study in docs/benchmarks.md"
    )
    options = parser.parse_args()
    if options.section:
        write_section(options.section, options.results)
        return
    results = read_results(options.results)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "index.html").write_text(html_of(results), encoding="utf-8")
    if options.docs:
        text, pictures = markdown_of(results)
        page = _DOCS / "benchmarks.md"
        page.write_text(with_others(text, page.read_text(encoding="utf-8")), encoding="utf-8")
        for name, picture in pictures.items():
            (_DOCS / "pictures" / name).write_text(picture, encoding="utf-8")
        lines = b"".join(msgspec.json.encode(result) + b"\n" for result in results)
        (_DOCS / "benchmarks.jsonl").write_bytes(lines)


if __name__ == "__main__":
    main()
