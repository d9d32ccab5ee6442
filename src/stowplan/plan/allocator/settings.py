"""AllocatorSettings: the options of PYTORCH_CUDA_ALLOC_CONF that change where blocks are placed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stowplan.errors import BadUse

MIB = 2**20
SMALLEST_BLOCK = 512
SMALL_REQUEST = MIB  # up to here a request goes to the small pool
LARGE_BLOCK = SMALL_REQUEST + SMALLEST_BLOCK  # the smallest of the large pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from here on a request gets a segment of its own size
SEGMENT_STEP = 2 * MIB

_FIRST_INTERVAL, _LAST_INTERVAL = 20, 35  # 1 MiB to 32 GiB: log2 of the sizes that divisions are set for


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """How an allocator is configured, and the device it allocates on.

    `capacity_bytes` is what the device can give to this process; None is without end. `fraction` is that of
    `set_per_process_memory_fraction`, a share of the capacity. `roundup_power2_divisions` has one number for
    all sizes or 16, for sizes from 1, 2, 4 MiB and so on.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    capacity_bytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.max_split_bytes is not None and self.max_split_bytes < LARGE_SEGMENT:
            raise BadUse(f"max_split_size_mb must be at least {LARGE_SEGMENT // MIB}")
        if self.max_non_split_rounding_bytes < LARGE_SEGMENT:
            raise BadUse(f"max_non_split_rounding_mb must be at least {LARGE_SEGMENT // MIB}")
        if len(self.roundup_power2_divisions) not in (0, 1, _LAST_INTERVAL - _FIRST_INTERVAL + 1):
            raise BadUse("roundup_power2_divisions has one number, or one for each power of two from 1 MiB")
        if any(n < 0 or n & (n - 1) for n in self.roundup_power2_divisions):
            raise BadUse("roundup_power2_divisions must be powers of two")
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise BadUse("garbage_collection_threshold must be in [0, 1)")
        if self.fraction is not None and not 0.0 < self.fraction <= 1.0:
            raise BadUse("the per-process memory fraction must be in (0, 1]")
        if self.fraction is not None and self.capacity_bytes is None:
            raise BadUse("a per-process memory fraction needs the capacity of the device")

    @property
    def allowed_bytes(self) -> int | None:
        """The limit that `fraction` sets, if any."""
        if self.fraction is None or self.capacity_bytes is None:
            return None
        return int(self.fraction * self.capacity_bytes)

    def block_bytes(self, nbytes: int) -> int:
        """The smallest block for a request."""
        if nbytes < SMALLEST_BLOCK:
            return SMALLEST_BLOCK
        if self.roundup_power2_divisions:
            divisions = self._divisions(nbytes)
            if divisions > 1 and nbytes > SMALLEST_BLOCK * divisions:
                step = (1 << (nbytes.bit_length() - 1)) // divisions
                return -(-nbytes // step) * step
        return -(-nbytes // SMALLEST_BLOCK) * SMALLEST_BLOCK

    def _divisions(self, nbytes: int) -> int:
        if len(self.roundup_power2_divisions) == 1:
            return self.roundup_power2_divisions[0]
        power = min(max(nbytes.bit_length() - 1, _FIRST_INTERVAL), _LAST_INTERVAL)
        return self.roundup_power2_divisions[power - _FIRST_INTERVAL]


def segment_bytes(block_bytes: int) -> int:
    """The size of the segment that is made for a block, without expandable segments."""
    if block_bytes <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if block_bytes < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-block_bytes // SEGMENT_STEP) * SEGMENT_STEP


_ELSEWHERE = ("pinned_", "release_lock_on_", "graph_capture_record_stream_reuse")
"""How settings begin that do not change where blocks on the device are placed."""


def parse_settings(
    text: str, *, capacity_bytes: int | None = None, fraction: float | None = None
) -> AllocatorSettings:
    """The settings in a text like PYTORCH_CUDA_ALLOC_CONF, `expandable_segments:True,max_split_size_mb:64`"""
    found = AllocatorSettings(capacity_bytes=capacity_bytes, fraction=fraction)
    for name, value in _pairs(text):
        try:
            found = _with(found, name, value)
        except ValueError:
            raise BadUse(f"{name}: {value!r} is not what PYTORCH_CUDA_ALLOC_CONF takes there") from None
    return found


def _with(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    match name:
        case "expandable_segments":
            return replace(settings, expandable_segments=_truth(value))
        case "max_split_size_mb":
            return replace(settings, max_split_bytes=int(value) * MIB)
        case "max_non_split_rounding_mb":
            return replace(settings, max_non_split_rounding_bytes=int(value) * MIB)
        case "garbage_collection_threshold":
            return replace(settings, garbage_collection_threshold=float(value))
        case "roundup_power2_divisions":
            return replace(settings, roundup_power2_divisions=_divisions_in(value))
        case "backend" if value != "native":
            raise BadUse(f"the model knows the native allocator alone, not the backend {value!r}")
        case _ if name != "backend" and not name.startswith(_ELSEWHERE):
            raise BadUse(f"no allocator setting {name!r}; write it as in PYTORCH_CUDA_ALLOC_CONF")
    return settings


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """The options, split at commas outside of brackets."""
    part, depth = "", 0
    for char in (*text, ","):
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            if part.strip():
                name, colon, value = part.partition(":")
                if not colon:
                    raise BadUse(f"allocator setting {part.strip()!r} has no value; write NAME:VALUE")
                yield name.strip(), value.strip()
            part = ""
        else:
            part += char


def _truth(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(value)
    return value == "True"


def _divisions_in(value: str) -> tuple[int, ...]:
    """One number, or `[256:1,512:2,>:4]`: divisions for sizes from 256 MiB, from 512 MiB, and for larger.

    The first number also holds for smaller sizes. Sizes that are left out are not rounded to divisions.
    """
    if not value.startswith("["):
        return (int(value),)
    divisions = [0] * (_LAST_INTERVAL - _FIRST_INTERVAL + 1)
    last: int | None = None
    for part in value.strip("[]").split(","):
        size, _, number = part.partition(":")
        if size.strip() == ">":
            first = 0 if last is None else last + 1
            divisions[first:] = [int(number)] * (len(divisions) - first)
            continue
        interval = min(max(int(size).bit_length() - 1, 0), len(divisions) - 1)
        if last is None:
            divisions[:interval] = [int(number)] * interval
        divisions[interval] = int(number)
        last = interval
    return tuple(divisions)
