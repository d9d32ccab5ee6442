"""A drawing as PNG: its SVG, as a browser on this machine shows it."""

import os
import subprocess
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from stowplan.errors import BadUse
from stowplan.report.picture.shapes import Drawing, svg_of_drawing

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
PIXELS = 3  # to a point: 216 to an inch, which print wants
_SECONDS = 60.0


def browser_found() -> str | None:
    """The path of a Chromium, or of a Chrome."""
    return next((path for name in BROWSERS if (path := which(name))), None)


def png_of_drawing(drawing: Drawing) -> bytes:
    """The drawing at three pixels to a point; BadUse where no browser can draw it."""
    browser = browser_found()
    if browser is None:
        raise BadUse(
            "a .png is drawn by Chromium or Chrome, and none is found; install one"
            " (apt-get install chromium), or write .svg, which needs none"
        )
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "picture.png"
        page.write_text(_PAGE + svg_of_drawing(drawing), encoding="utf-8")
        said = _photographed(browser, drawing, page, picture)
        if not picture.exists():
            raise BadUse(f"{browser} drew no .png: {said}; .svg needs no browser")
        return picture.read_bytes()


_PAGE = '<!doctype html><meta charset="utf-8"><style>body { margin: 0 } svg { display: block }</style>'


def _photographed(browser: str, drawing: Drawing, page: Path, picture: Path) -> str:
    """Have the browser write `picture`; returns the last line that it said."""
    words = [
        browser,
        "--headless",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--force-color-profile=srgb",
        "--hide-scrollbars",
        "--no-first-run",
        f"--force-device-scale-factor={PIXELS}",
        f"--window-size={drawing.width},{drawing.height}",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--screenshot={picture}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses to run as root with its sandbox
        page.as_uri(),
    ]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        return str(fault)
    return next(reversed(done.stderr.splitlines()), f"it ended with {done.returncode}")
