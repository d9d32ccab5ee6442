"""Result: one measured figure with all that is needed to judge and repeat it; what every study writes.

A study tells its figures as it finds them. They are appended to `build/bench/STUDY.jsonl`, one to a line, and
of a case the last run counts: a study may be run in parts, or again.
"""

import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

import msgspec

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "bench"
_BEGUN = datetime.now(UTC).isoformat(timespec="seconds")


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure. `way` is what was tried on `case`; `spread` are its quartiles, where it was repeated."""

    study: str
    case: str
    way: str
    figure: str
    value: float
    unit: str
    spread: tuple[float, float] | None
    command: str
    torch: str
    machine: str
    when: str  # the study was begun


@dataclass(frozen=True, slots=True)
class Study:
    """Where the figures of a study go; run by the command that the process was started with."""

    name: str
    folder: Path = FOLDER

    def tell(
        self,
        case: str,
        way: str,
        figure: str,
        value: float,
        unit: str,
        spread: tuple[float, float] | None = None,
    ) -> None:
        """Write down one figure."""
        result = Result(
            self.name,
            case,
            way,
            figure,
            float(value),
            unit,
            spread,
            command=_command(),
            torch=version("torch"),
            machine=machine(),
            when=_BEGUN,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")

    def told(self) -> "list[Result]":
        """The figures that were written down so far, of each case those of its last run."""
        return read_results(self._path) if self._path.exists() else []

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.name}.jsonl"


def read_results(source: Path = FOLDER) -> list[Result]:
    """All figures in a file or in a folder's files, of each case those of its last run."""
    found: dict[tuple[str, str], list[Result]] = {}
    for path in sorted(source.glob("*.jsonl")) if source.is_dir() else [source]:
        for line in path.read_bytes().splitlines():
            result = msgspec.json.decode(line, type=Result)
            of_case = found.setdefault((result.study, result.case), [])
            if of_case and of_case[0].when != result.when:
                of_case.clear()
            of_case.append(result)
    return [result for of_case in found.values() for result in of_case]


def spread_of(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]


def ratio_of(seconds: Sequence[float], plain: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Times over those of eager in the same round: the median, and the quartiles."""
    ratios = [one / other for one, other in zip(seconds, plain, strict=True)]
    return median(ratios), spread_of(ratios)


def machine() -> str:
    """The processor and how many threads of it compute."""
    names = (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name"))
    import torch  # here: whoever only reads results needs none

    threads = torch.get_num_threads()
    return f"{next(names, platform.processor())}, {threads} thread{'s' if threads > 1 else ''}"


def _cpuinfo() -> Iterator[str]:
    try:
        yield from Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return


def _command() -> str:
    module = Path(sys.argv[0]).resolve()
    if not module.is_relative_to(ROOT):
        return shlex.join(sys.argv)
    dotted = ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    return shlex.join(["python", "-m", dotted, *sys.argv[1:]])
