"""ProbeCache: what ops were seen to cost, kept on disk for the next time.

There is a file for each machine, build of PyTorch and number of threads. One that is damaged or of another
version is no error: what it held is measured again. Files are replaced whole, so that no process reads half
of what another writes.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from errno import ENOENT
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, TypeAlias

import msgspec

from stowplan.plan.pricing import Machine

VERSION = 4
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Rate: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
Rates: TypeAlias = tuple[Rate, Rate, Seconds]  # of a tier: bytes per second out and back, latency in seconds


class Cost(msgspec.Struct, frozen=True):
    """The cost of one run: its seconds, and how far memory rises above its level before."""

    seconds: Seconds
    rise_bytes: Bytes


class Platform(msgspec.Struct, frozen=True):
    """Where a cost holds. `kernels` says which of PyTorch's kernels are in use there."""

    cpu: str
    device: str
    torch: str
    threads: int
    kernels: str


class Findings(msgspec.Struct, frozen=True):
    """The known costs on one platform: by the text of signatures, its roofline, the rates of tiers."""

    platform: Platform
    costs: dict[str, Cost] = {}
    machine: Machine | None = None
    tiers: dict[str, Rates] = {}


class _Frame(msgspec.Struct, frozen=True):
    version: int
    digest: str
    findings: msgspec.Raw


@dataclass(frozen=True, slots=True)
class ProbeCache:
    """A folder of findings: the user's cache folder, unless another is given."""

    folder: Path | None = None

    def read(self, platform: Platform) -> Findings:
        """The findings for `platform`, which may be empty."""
        try:
            findings = _unpacked(self._path(platform).read_bytes())
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return Findings(platform)
        return findings if findings.platform == platform else Findings(platform)

    def add(
        self,
        platform: Platform,
        costs: Mapping[str, Cost],
        machine: Machine | None = None,
        tiers: Mapping[str, Rates] = MappingProxyType({}),
    ) -> None:
        """Write down more, beside what others have meanwhile. Where nothing can be written, nothing is."""
        known = self.read(platform)
        merged = Findings(
            platform, {**known.costs, **costs}, machine or known.machine, {**known.tiers, **tiers}
        )
        try:
            replace_file(self._path(platform), _packed(merged))
        except OSError:
            return

    def _path(self, platform: Platform) -> Path:
        name = sha256(msgspec.json.encode(platform)).hexdigest()[:16]
        return (self.folder or user_folder("probes")) / f"{name}.json"


def user_folder(part: str) -> Path:
    """The user's cache folder; OSError for a user without a home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as fault:
        raise FileNotFoundError(ENOENT, "this user has no home folder; set XDG_CACHE_HOME") from fault
    return Path(base) / "stowplan" / part


def _packed(findings: Findings) -> bytes:
    content = msgspec.json.encode(findings)
    return msgspec.json.encode(_Frame(VERSION, _digest(content), msgspec.Raw(content)))


def _unpacked(data: bytes) -> Findings:
    frame = msgspec.json.decode(data, type=_Frame)
    if frame.version != VERSION or frame.digest != _digest(bytes(frame.findings)):
        raise ValueError("another version, or damaged")
    findings = msgspec.json.decode(frame.findings, type=Findings)
    if findings.machine is not None:
        msgspec.convert(astuple(findings.machine), type=Rates)
    return findings


def _digest(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
