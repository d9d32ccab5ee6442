"""The machine at hand: its name, how calls are timed on it, its roofline, and the costs found on it.

Other work on the machine can only make a call slower, so a call is timed several times, and the least counts.

ProbeCache keeps on disk what ops were seen to cost. There is a file for each machine, build of PyTorch and
number of threads. One that is damaged or of another version is no error: what it held is measured again.
Files are replaced whole, so that no process reads half of what another writes.
"""

import os
import platform as host
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from ctypes import CDLL, c_size_t, c_void_p
from dataclasses import astuple, dataclass
from errno import ENOENT
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import msgspec
import torch

from stowplan.alone import uninterrupted
from stowplan.formats.checked import digest_of
from stowplan.ir import Graph
from stowplan.plan.pricing import Machine

VERSION = 7  # of the file of prices, and of what they are measured on: older ones are measured anew
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
    return msgspec.json.encode(_Frame(VERSION, digest_of(content), msgspec.Raw(content)))


def _unpacked(data: bytes) -> Findings:
    frame = msgspec.json.decode(data, type=_Frame)
    if frame.version != VERSION or frame.digest != digest_of(bytes(frame.findings)):
        raise ValueError("another version, or damaged")
    findings = msgspec.json.decode(frame.findings, type=Findings)
    if findings.machine is not None:
        msgspec.convert(astuple(findings.machine), type=Rates)
    return findings


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with uninterrupted():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


USER_CACHE = ProbeCache()
_SIDE = 768  # of the matrices multiplied: large enough to be arithmetic alone
_COPIED_BYTES = 2**26  # more than a core's own caches hold


def device_of(graph: Graph) -> torch.device:
    """The accelerator that a step runs on, if it does."""
    names = {op.device for op in graph.ops} - {"", "cpu"}
    return torch.device(min(names, default="cpu"))


def platform_of(device: torch.device) -> Platform:
    """Everything that the cost of an op on `device` depends on, except the op itself."""
    return Platform(
        cpu=_cpu_name(),
        device=_device_name(device),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
        kernels=_kernels(),
    )


def measure_machine(device: torch.device | str = "cpu", *, cache: ProbeCache | None = USER_CACHE) -> Machine:
    """How fast `device` multiplies, copies and starts ops; measured once and remembered."""
    chosen = torch.device(device)
    place = platform_of(chosen)
    known = cache.read(place).machine if cache else None
    if known is not None:
        return known
    machine = _measured(chosen)
    release_free_memory(chosen)
    if cache:
        cache.add(place, {}, machine)
    return machine


def _measured(device: torch.device) -> Machine:
    left, right = (torch.full((_SIDE, _SIDE), 0.5, device=device) for _ in range(2))
    nbytes = room_for(_COPIED_BYTES, device)
    source = torch.zeros(nbytes // 4, device=device)
    target, scalar = torch.zeros_like(source), torch.zeros((), device=device)

    def seconds(run: Callable[[], object]) -> float:
        return least_seconds(run, device, repeats=7)

    with torch.no_grad():
        return Machine(
            macs_per_second=_SIDE**3 / seconds(lambda: left @ right),
            bytes_per_second=2 * nbytes / seconds(lambda: target.copy_(source)),
            launch_seconds=seconds(lambda: scalar + scalar),
        )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return host.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, host.processor())


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def _kernels() -> str:
    mkldnn = "mkldnn" if torch.backends.mkldnn.enabled else "no mkldnn"
    deterministic = ", deterministic" if torch.are_deterministic_algorithms_enabled() else ""
    return f"{torch.backends.cpu.get_cpu_capability()}, {mkldnn}{deterministic}"


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that random ops on `device` draw from; it lies in the host's memory."""
    state = torch.get_rng_state() if device.type == "cpu" else _random_of(device).get_rng_state(device)
    assert isinstance(state, torch.Tensor)
    return state


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Let random ops on `device` draw from a state on."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _random_of(device).set_rng_state(state, device)


def _random_of(device: torch.device) -> Any:
    return torch.get_device_module(device)


def release_free_memory(device: torch.device) -> None:
    """Give back to the system what this process has freed; allocators keep it for later otherwise.

    On an accelerator the segments that measurements leave would fragment the step's memory.
    """
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    trim = getattr(CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


_HEAP_BLOCK = 2**25 - 2**16  # the largest block that the C library takes from its heap


def settle_heap(device: torch.device) -> None:
    """Bring the C library's heap into the state that it has after a few steps of training.

    It maps a large block anew for each request, until a block of that size was freed once; from then on it
    reuses memory whose pages are there. An op that makes 4 MiB takes five times as long before that, so its
    price would depend on what was probed earlier. The block is never touched and no tensor, so that nobody
    counts it.
    """
    if device.type == "cpu" and sys.platform == "linux":
        library = CDLL(None)
        library.malloc.restype = c_void_p
        library.free(c_void_p(library.malloc(c_size_t(_HEAP_BLOCK))))


_PAGE, _LARGE_PAGE = 2**12, 2**21
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # of Linux


def prefer_large_pages(storage: torch.UntypedStorage) -> None:
    """Ask the system for large pages where a storage of the CPU lies; each first touch then costs less."""
    _advise(storage, _MADV_HUGEPAGE, _LARGE_PAGE)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same new tensor with all its pages there, as far as the system can do that.

    Tiles that write a few rows each would have the system bring in most pages for the first of them, which
    takes longer than large pages at once, and longer than the tile itself.
    """
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and storage.nbytes() > _HEAP_BLOCK:
        prefer_large_pages(storage)
        _advise(storage, _MADV_POPULATE_WRITE, _PAGE)
    return tensor


def _advise(storage: torch.UntypedStorage, advice: int, page: int) -> None:
    """Advise Linux on the whole pages of a storage; advice that it does not know changes nothing."""
    first = -(-storage.data_ptr() // page) * page
    length = (storage.data_ptr() + storage.nbytes() - first) // page * page
    if sys.platform == "linux" and length > 0:
        CDLL(None).madvise(c_void_p(first), c_size_t(length), advice)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The seconds of one call, until the device is done and the result is freed."""
    clock = clock_of(device)
    started = clock()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock() - started


def clock_of(device: torch.device) -> Callable[[], float]:
    """Work on a single thread is timed by the thread's own clock, which stands still while others run."""
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_alone else time.perf_counter


def least_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, limit_seconds: float = 1.0
) -> float:
    """The least of `repeats` calls after a first to warm up, as far as they begin within `limit_seconds`."""
    times = [seconds_of(run, device)]
    while len(times) <= repeats and sum(times) < limit_seconds:
        times.append(seconds_of(run, device))
    return min(times)


def room_for(nbytes: int, device: torch.device) -> int:
    """`nbytes`, or as much as a device that is nearly full can spare for a measurement."""
    return min(nbytes, max(free_bytes(device) // 4, 4096))


def free_bytes(device: torch.device) -> int:
    """Memory of `device` that nobody uses; half the installed memory where the system does not say.

    What an accelerator's allocator keeps for later requests is free too.
    """
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return int(free) + max(kept, 0)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(available) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
