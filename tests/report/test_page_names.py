"""Names come from files. Whatever they hold, nothing of it runs, and all of it is shown."""

import pytest

from stowplan.ir import Document, Graph, Kind, Note, NoteKind, Op, Phase, Tensor, Use
from stowplan.report.page import subject_of
from tests.support.pages import browser, written

_ACT = "window.ran = true; alert(1)"
_MARKUP = (
    f"<script>{_ACT}</script>",
    f"</script><script>{_ACT}</script>",
    f"<img src=x onerror='{_ACT}'>",
    f"<svg onload='{_ACT}'>",
    f"<svg><script>{_ACT}</script></svg>",
    "<iframe srcdoc='<script>parent.ran = true</script>'>",
    f"<body onload='{_ACT}'>",
    f"<a href='javascript:{_ACT}'>x</a>",
    "<style>@import 'http://example.com/x.css'</style>",
    "<link rel=stylesheet href=http://example.com/x.css>",
    "<meta http-equiv=refresh content='0;url=http://example.com'>",
    "<base href=http://example.com>",
    "<img src=http://example.com/pixel.png>",
    "<object data=http://example.com/x>",
    "<form action=http://example.com><button>",
    f"<details open ontoggle='{_ACT}'>",
    f"<input autofocus onfocus='{_ACT}'>",
    f"<video><source onerror='{_ACT}'></video>",
    f"'\" onmouseover='{_ACT}'",
    f"--><script>{_ACT}</script><!--",
    f"]]><script>{_ACT}</script>",
    "<!-- a comment that does not end",
    "<script>/* a script that does not end",
    "&lt;script&gt; &amp; &#60;b&#62;",
    "<noscript><p title='</noscript><script>window.ran = true</script>'>",
)
_CODE = (
    "${window.ran = true}",
    "{{constructor.constructor('window.ran = true')()}}",
    "`;window.ran = true;`",
    "\\u003cscript\\u003e",
    '"}]}</script>',
    "__proto__",
    "constructor",
    "toString",
    "javascript:window.ran = true",
    "'); DROP TABLE tensors; --",
)
_CHARACTERS = (
    "\x00 nul \x01\x02",
    "bell \x07 and escape \x1b[31m red",
    "tab\tnew\nline\r return",
    "delete \x7f and \x9b csi",
    "\u202eevil right to left",
    "\u2066isolated\u2069 \u200f marks",
    "zero\u200bwidth\u200d\ufeff",
    "line\u2028separator\u2029",
    "\u05d0\u05d1\u05d2 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "e\u0301" * 40,
    "\u0000",
    " ",
    "x" * 20_000,
    "wide " * 500,
)
NAMES = (*_MARKUP, *_CODE, *_CHARACTERS)


def hostile_step() -> Document:
    """An op and a tensor of every name, with the name in every place a name can have."""
    tensors, ops = {}, []
    for number, name in enumerate(NAMES):
        made = Tensor(f"{number}:{name}", Kind.ACTIVATION, nbytes=1000 - number, name=name)
        tensors[made.id] = made
        ops.append(
            Op(
                f"op {number}:{name}",
                name,
                Phase.FORWARD,
                outputs=(Use(made.id),),
                inputs=tuple(map(Use, list(tensors)[-2:-1])),
                scope=name,
                source=name,
            )
        )
    graph = Graph(tensors, tuple(ops), frozenset(tensors), name=NAMES[0])
    return Document("graph", graph, notes=tuple(Note(NoteKind.ODD, name, name) for name in NAMES))


def test_there_are_fifty_of_them() -> None:
    assert len(set(NAMES)) == 50


@pytest.mark.browser
def test_none_runs_and_all_are_shown() -> None:
    path = written(subject_of(hostile_step(), NAMES[1]), subject_of(hostile_step(), NAMES[2]))
    with browser().page(path) as page:
        assert page.run("document.querySelectorAll('.alive button').length") == 40
        for number, name in enumerate(NAMES):
            for what, prefix in (("tensor", ""), ("op", "op ")):
                page.run(f"stow.shownState.select({{{what}: {number}}})")
                heading = page.run("document.querySelector('.card h3').textContent")
                assert heading.startswith(f"{prefix}{number}:")
                assert seen(name) in heading
            assert seen(name) in page.run("document.querySelector('.card').textContent")
        page.settle()
        told = page.run("document.querySelector('#notes').textContent")
        assert all(seen(name) in told for name in NAMES)
        assert page.run("typeof window.ran") == "undefined"
        assert (
            page.run("document.querySelectorAll('main img, main iframe, main script, main svg').length") == 0
        )
        assert page.run("document.documentElement.scrollWidth") <= 1280
        assert page.errors == []
        assert page.requests == [path.as_uri()]


@pytest.mark.browser
def test_the_policy_lets_nothing_in() -> None:
    path = written(subject_of(hostile_step(), "names"))
    with browser().page(path) as page:
        policy = page.run("document.querySelector('meta[http-equiv]').content")
        allowed = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert allowed.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
        assert allowed["default-src"] == allowed["base-uri"] == allowed["form-action"] == "'none'"
        assert all(allowed[kind].startswith("'sha256-") for kind in ("script-src", "style-src"))
        page.run("document.body.append(Object.assign(new Image(), {src: 'http://example.com/x.png'}))")
        page.run("document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))")
        page.settle()
        assert page.run("typeof window.ran") == "undefined"
        blocked = [error for error in page.errors if "Content Security Policy" in error]
        assert len(blocked) == 2


def seen(name: str) -> str:
    """A name as the page writes it: what cannot be seen has a picture or its number."""
    return "".join(char if not unseen(char) else picture(char) for char in name)


def unseen(char: str) -> bool:
    return not char.isprintable() and char != " "


def picture(char: str) -> str:
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"\u27e8U+{ord(char):04X}\u27e9"
