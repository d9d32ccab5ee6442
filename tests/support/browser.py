"""A headless Chromium driven over a pipe by its DevTools protocol: nothing to install but the browser."""

import base64
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from stowplan.report.picture.png import browser_found

_SECONDS = 60.0
_DRAWN = "performance.getEntriesByName('drawn').length"  # what a report says in the end
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
)


def chromium() -> str:
    """The browser's path; without one, CI fails and others skip."""
    found = browser_found()
    if found is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("no chromium: apt-get install chromium")
    return str(found)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are out of the way of the descriptors that the browser wants."""
    low = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return read, write


class Browser:
    """One browser process. Commands are JSON ended by a zero byte, on the descriptors 3 and 4."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._commands = _pipe()
        self._answers, answers = _pipe()
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        words = [chromium(), *_FLAGS, *root, f"--user-data-dir={self._folder.name}"]
        self._process = os.posix_spawn(
            words[0],
            words,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, commands, 3),
                (os.POSIX_SPAWN_DUP2, answers, 4),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
        os.close(commands)
        os.close(answers)
        self._number, self._buffer = 0, b""
        self.pages: dict[str, Page] = {}

    def close(self) -> None:
        """End the browser."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._commands)
        os.close(self._answers)
        self._folder.cleanup()

    def ask(self, method: str, session: str = "", **parameters: object) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come meanwhile go to their pages."""
        self._number += 1
        command: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            message = self._message()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            if page := self.pages.get(message.get("sessionId", "")):
                page.notice(message)
        raise TimeoutError(method)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._answers, 1 << 20)
            assert received, "the browser ended"
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    @contextmanager
    def page(self, path: Path, width: int = 1280, height: int = 800, until: str = _DRAWN) -> Iterator["Page"]:
        """A file in a window of its own, drawn to its end: when the expression `until` holds."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        try:
            page.open(path, width, height, until)
            yield page
        finally:
            del self.pages[session]
            self.ask("Target.closeTarget", targetId=target)


@dataclass
class Page:
    """One open report, and what the browser had to say about it."""

    browser: Browser
    session: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path, width: int, height: int, until: str) -> None:
        """Load a file and wait until all is drawn."""
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self._ask(f"{domain}.enable")
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._ask("Page.navigate", url=path.as_uri())
        self.wait_for(until)

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        return self.browser.ask(method, self.session, **parameters)

    def notice(self, event: dict[str, Any]) -> None:
        """Keep what would be a fault of the page."""
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"])[:1000])
            case "Runtime.consoleAPICalled":
                self.errors.append(json.dumps(parameters["args"])[:1000])
            case "Log.entryAdded":
                self.errors.append(parameters["entry"]["text"])
            case "Page.javascriptDialogOpening":
                self.errors.append(f"a dialog: {parameters['message']}")
                # Not answered: the page that opens one is at fault and its test ends by the timeout.
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def prefer_colours(self, scheme: str) -> None:
        """Show the page as to someone who prefers "light" or "dark" ones, drawn anew if it was not so."""
        turns = not self.run(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
        self.run("performance.clearMarks('drawn')")
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self._ask("Emulation.setEmulatedMedia", features=[wanted])
        if turns:
            self.wait_for(_DRAWN)

    def own_seconds(self) -> float:
        """What the page's thread has had of a processor so far, however many others wanted it too."""
        metrics = self._ask("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "ThreadTime"))

    def wait_for(self, script: str) -> None:
        """Wait until an expression holds."""
        until = time.monotonic() + _SECONDS
        while not self.run(script):
            assert time.monotonic() < until, f"{script} does not come true; {self.errors}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until what was asked for is painted."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, x: float, y: float, to_x: float) -> None:
        """Press, move along a line, let go."""
        self.point(x, y)
        for kind, at in (("mousePressed", x), ("mouseMoved", to_x), ("mouseReleased", to_x)):
            self._ask("Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", clickCount=1)

    def click(self, x: float, y: float) -> None:
        """Press and let go at one place."""
        self.drag(x, y, x)

    def press(self, key: str) -> None:
        """Press and let go of a key."""
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self._ask("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A picture of what is in sight, or of the whole page."""
        answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


_COLLISIONS = """(() => {
  const words = 'h1, h2, .key, .tab, .figure b, .searching, figcaption';
  const texts = Array.from(document.querySelectorAll(words));
  const inSight = (text) => {
    const own = text.getBoundingClientRect();
    const around = text.closest('.levels')?.getBoundingClientRect();
    return !around || own.bottom <= around.bottom;
  };
  const boxes = texts.filter(inSight).map((text) => [text.textContent, text.getBoundingClientRect()]);
  const meet = (a, b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return boxes.flatMap(([one, box], at) =>
    boxes.slice(at + 1).filter(([, other]) => meet(box, other)).map(([two]) => `${one} / ${two}`));
})()"""

_ROWS = """Array.from(document.querySelectorAll('.alive .row'), (row) => [
  row.getBoundingClientRect().bottom,
  row.querySelector('.name').textContent,
  row.querySelector('.why').textContent,
])"""

_SPILLED = """(() => {
  const words = 'h1, h2, h3, .key, .tab, figcaption, .alive-now, .where, .figure, .figure *';
  const wide = Array.from(document.querySelectorAll(words))
    .filter((text) => text.scrollWidth > text.clientWidth + 1)
    .filter((text) => getComputedStyle(text).overflowX === 'visible')
    .filter((text) => getComputedStyle(text).display !== 'inline');
  const outside = Array.from(document.querySelectorAll('.figure'))
    .filter((figure) => figure.getBoundingClientRect().right > innerWidth);
  const pen = document.createElement('canvas').getContext('2d');
  const cut = Array.from(document.querySelectorAll('input[placeholder]')).filter((input) => {
    const { font, fontSize, fontFamily, paddingLeft, paddingRight } = getComputedStyle(input);
    pen.font = font || `${fontSize} ${fontFamily}`;
    const room = input.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight) - 16; // of its cross
    return pen.measureText(input.placeholder).width > room;
  });
  return [...wide, ...outside].map((text) => text.textContent).concat(cut.map((input) => input.placeholder));
})()"""


def collisions(page: Page) -> list[str]:
    """Pairs of words that lie over one another."""
    found: list[str] = page.run(_COLLISIONS)
    return found


def spilled(page: Page) -> list[str]:
    """Words that are wider than the place they stand in."""
    found: list[str] = page.run(_SPILLED)
    return found


def rows_in_sight(page: Page, height: int) -> list[tuple[str, str]]:
    """What is alive and why, as far as it is seen without scrolling."""
    rows: list[list[Any]] = page.run(_ROWS)
    return [(name, why) for bottom, name, why in rows if bottom <= height]
