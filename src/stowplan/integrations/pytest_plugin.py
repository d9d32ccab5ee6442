"""pytest: a limit on the peak of a test, and a table of all peaks.

    @pytest.mark.limit_peak("6GiB")
    def test_training_step(): ...

The test fails if the tensors that it allocates take more bytes than that at once. Tensors of fixtures, made
before the test begins, do not count. `pytest --stowplan-peaks` measures every test and prints the peaks,
largest first. PyTorch is imported only if a test is measured.
"""

from collections.abc import Callable
from functools import partial

import pytest

from stowplan.errors import BadUse
from stowplan.units import format_bytes, parse_bytes

_PROPERTY = "stowplan_peak_bytes"  # in the report of a test, and so in JUnit files
_SHOWN = 25


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("stowplan").addoption(
        "--stowplan-peaks", action="store_true", help="measure the memory of every test and print the peaks"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "limit_peak(limit, device=None): fail if the test's tensors take more bytes than `limit` at once,"
        " such as 6GiB; on `device`, by default the accelerator if there is one, or else the CPU",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Wraps the test, so that only the test itself is measured, without its fixtures."""
    limit, device = _limit_of(item)
    if limit is not None or item.config.getoption("--stowplan-peaks"):
        item.runtest = partial(_measured, item, item.runtest, limit, device)  # type: ignore[method-assign]


def _limit_of(item: pytest.Item) -> tuple[int | None, str | None]:
    marker = item.get_closest_marker("limit_peak")
    if marker is None:
        return None, None
    try:
        return _read_limit(*marker.args, **marker.kwargs)
    except (BadUse, TypeError) as fault:
        raise pytest.UsageError(f"limit_peak of {item.nodeid}: {fault}") from None


def _read_limit(limit: int | str, device: str | None = None) -> tuple[int, str | None]:
    return parse_bytes(limit, "limit"), device


def _measured(item: pytest.Item, run: Callable[[], None], limit: int | None, device: str | None) -> None:
    import torch

    from stowplan.run.measure import measure

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    peak = measure(run, device=device or accelerator or "cpu").measured_rise_bytes
    item.user_properties.append((_PROPERTY, peak))
    if limit is not None and peak > limit:
        pytest.fail(
            f"the test's tensors take {format_bytes(peak)} ({peak:,} B) at once, and the limit is"
            f" {format_bytes(limit)} ({limit:,} B); `stowplan inspect` shows where the memory of a step goes",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of `--stowplan-peaks`."""
    if not config.getoption("--stowplan-peaks"):
        return
    reports = [report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, ())]
    peaks = [(dict(report.user_properties).get(_PROPERTY, 0), report.nodeid) for report in reports]
    rows = sorted(((peak, name) for peak, name in peaks if peak), key=lambda row: (-row[0], row[1]))
    terminalreporter.section("peaks of tests")
    for peak, name in rows[:_SHOWN]:
        terminalreporter.write_line(f"{format_bytes(peak):>9}  {name}")
    if len(rows) > _SHOWN:
        terminalreporter.write_line(
            f"and {len(rows) - _SHOWN} tests below {format_bytes(rows[_SHOWN - 1][0])}"
        )
