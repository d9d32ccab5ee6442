"""The report as one self-contained page: script, style and data in it, and a policy that admits nothing else.

Names come from files and may hold anything. They enter the page as gzipped JSON in base64, which no name can
break out of, and the script shows them as text only.
"""

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files

from stowplan.report.page.data import data_of
from stowplan.report.page.subject import PageSubject, Thing, subject_of
from stowplan.units import on_one_line

__all__ = ["PageSubject", "Thing", "page_of", "subject_of"]


# In the order in which they are loaded: each may use those before it.
_SCRIPTS = (
    "uPlot.iife.min.js",
    "stow.js",
    "text.js",
    "model.js",
    "state.js",
    "palette.js",
    "raster.js",
    "strip.js",
    "curve.js",
    "network.js",
    "lifetimes.js",
    "arena.js",
    "panel.js",
    "modules.js",
    "tiles.js",
    "regions.js",
    "frontier.js",
    "beside.js",
    "main.js",
)
_STYLES = ("uPlot.min.css", "report.css")
_LICENCE = "uPlot.LICENSE"


def page_of(subjects: Sequence[PageSubject], title: str = "") -> str:
    """The page for one subject, or for several to compare."""
    title = title or " against ".join(subject.name for subject in subjects)
    script, style = _joined(_SCRIPTS), _joined(_STYLES)
    return _PAGE.format(
        policy=f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'",
        title=escape(on_one_line(title)),
        style=style,
        licence=_asset(_LICENCE),
        data=_packed(data_of(subjects, title)),
        script=script,
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title} - stowplan</title>
<!-- The memory curve and the frontier are drawn by uPlot:
{licence}-->
<style>{style}</style>
</head>
<body>
<noscript>This report draws itself with the script inside it; nothing is loaded from elsewhere.</noscript>
<main id="report"></main>
<script type="application/gzip" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (files("stowplan.report") / "assets" / name).read_text(encoding="utf-8")


def _joined(names: Sequence[str]) -> str:
    return "\n".join(map(_asset, names))


def _hash(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


def _packed(value: object) -> str:
    """JSON, compressed and spelled in letters, digits, + and /."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()
