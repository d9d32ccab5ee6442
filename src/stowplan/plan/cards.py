"""Cards: devices that are not here, by their published figures, and what ops would take on them.

A card is a row of `cards.toml`, or a TOML file with the same keys. Seconds come from a roofline: the slower
of arithmetic at the rate of the op's dtype, and memory traffic. Workspace is from `ops/cuda_workspace.py`.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from stowplan.analyse.facts import costs_of, estimated_workspaces
from stowplan.errors import BadInput, BadUse, nearest
from stowplan.formats.checked import bad_input_of
from stowplan.ir import DType, Graph, Op
from stowplan.ops.cublas import cublas_workspaces
from stowplan.ops.cuda_workspace import Chip, Workspace, cuda_workspace_of, peak_of
from stowplan.ops.table import site_of
from stowplan.plan.options import PlanOptions
from stowplan.plan.pricing import Basis, Pricing, Tier
from stowplan.units import parse_bytes

_TABLE = Path(__file__).with_name("cards.toml")
_TF32_OPS = "aten.convolution"  # PyTorch lets cuDNN use tf32 by default, and cuBLAS not

_Rate = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class PeakDifference:
    """A reason why the peak without a plan differs from that of the CPU's capture, and by how many bytes.

    `calls` is how many calls of forward it concerns; 0 where it is not about calls.
    """

    cause: str
    calls: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Card:
    """A device by its figures; `kind` is its device type in PyTorch.

    `flops` are by dtype, with "tf32" for float32 on tensor cores; a dtype that is missing runs at the rate of
    float32. A `kind` other than "cuda" runs the kernels that the step was captured with.
    """

    id: str
    name: str
    memory_bytes: int
    bytes_per_second: float
    flops: dict[str, float]
    kind: str = "cuda"
    context_bytes: int = 0
    host_bytes_per_second: float = 12e9
    launch_seconds: float = 5e-6
    capability: float = 8.0
    attentions: tuple[str, ...] = ("flash", "efficient")
    multiprocessors: int = 108

    @property
    def chip(self) -> Chip:
        """What the workspace of kernels depends on."""
        return Chip(self.capability, self.multiprocessors)

    @property
    def usable_bytes(self) -> int:
        """What PyTorch's allocator can reserve."""
        return self.memory_bytes - self.context_bytes

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def device(self) -> str:
        """The name of the device as captured graphs spell it."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:0"

    @property
    def has_tensor_cores(self) -> bool:
        """For float32 and bfloat16."""
        return self.capability >= 8.0

    @property
    def tier(self) -> Tier:
        """The host's memory, of which as much is taken to be free as the card has."""
        rate = self.host_bytes_per_second
        return Tier("host", self.memory_bytes, rate, rate, self.launch_seconds)

    def lasting_bytes(self, graph: Graph) -> tuple[int, ...]:
        """Workspaces that libraries keep from their first use on."""
        return cublas_workspaces(graph.ops, self.capability) if self.is_cuda else ()

    def flops_of(self, graph: Graph, op: Op) -> float:
        """The rate of the op's first floating-point operand."""
        dtypes = (graph.tensors[name].dtype for name in (*op.reads(), *op.writes()))
        found = next((dtype for dtype in dtypes if dtype is not None and dtype in _FLOATS), DType.FLOAT32)
        is_tf32 = found is DType.FLOAT32 and op.type.startswith(_TF32_OPS)
        default = self.flops["float32"]
        return self.flops.get("tf32", default) if is_tf32 else self.flops.get(found, default)


@dataclass(frozen=True, slots=True)
class PeakOnCard:
    """The peak of a step's requested bytes on a card, without a plan, beside that of the CPU's capture.

    `lasting_bytes` are workspaces that libraries keep beside the step's tensors; `peak_bytes` includes them.
    `notes` say what the figures leave out.
    """

    card: Card
    here_peak_bytes: int
    peak_bytes: int
    lasting_bytes: int
    differences: tuple[PeakDifference, ...]
    notes: tuple[str, ...]


_FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """A card as the file spells it."""

    name: str
    memory: str
    bandwidth: _Rate
    flops: dict[str, _Rate]
    kind: str = "cuda"
    context: str = "0"
    host_bandwidth: _Rate = 12e9
    launch: _Rate = 5e-6
    capability: float = 8.0
    attention: tuple[str, ...] = ("flash", "efficient")
    multiprocessors: Annotated[int, msgspec.Meta(gt=0)] = 108

    def card(self, name: str) -> Card:
        if "float32" not in self.flops:
            raise BadInput("flops has no float32, the rate of every dtype that is not named", where=name)
        if unknown := set(self.attention) - {"flash", "efficient", "cudnn"}:
            raise BadInput(f"attention has {min(unknown)!r}; there is flash, efficient, cudnn", where=name)
        card = Card(
            id=name,
            name=self.name,
            memory_bytes=parse_bytes(self.memory, "memory"),
            bytes_per_second=self.bandwidth,
            flops=self.flops,
            kind=self.kind,
            context_bytes=parse_bytes(self.context, "context"),
            host_bytes_per_second=self.host_bandwidth,
            launch_seconds=self.launch,
            capability=self.capability,
            attentions=self.attention,
            multiprocessors=self.multiprocessors,
        )
        if card.usable_bytes <= 0:
            raise BadInput(f"the context takes all of the {self.memory}", where=name)
        return card


def card_named(text: str) -> Card:
    """A card of the table, or the one in a file whose name ends in .toml."""
    if text.endswith(".toml"):
        return _card_in(Path(text))
    known = cards()
    if text not in known:
        names = ", ".join(known)
        raise BadUse(
            f"no card {text!r}{nearest(text, known)}; there is {names}, or FILE.toml with the"
            " figures of another one"
        )
    return known[text]


@cache
def cards() -> dict[str, Card]:
    """All cards of the table, by id."""
    rows = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {name: msgspec.convert(row, _Row).card(name) for name, row in rows.items()}


def _card_in(path: Path) -> Card:
    try:
        row = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise BadUse(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except UnicodeDecodeError as fault:
        raise BadInput("is no text", file=str(path)) from fault
    except tomllib.TOMLDecodeError as fault:
        raise BadInput(str(fault), file=str(path)) from fault
    try:
        return msgspec.convert(row, _Row).card(path.stem)
    except msgspec.ValidationError as fault:
        raise bad_input_of(fault).in_file(str(path)) from fault
    except BadInput as fault:
        raise fault.in_file(str(path)) from fault
    except BadUse as fault:  # of a size
        raise BadInput(str(fault), file=str(path)) from fault


def price_on_card(graph: Graph, card: Card, options: PlanOptions) -> Pricing:
    """Seconds by roofline and workspace by table; if offloading is allowed, a tier as large as the card."""
    costs = costs_of(graph)
    seconds = {
        op.id: card.launch_seconds
        + max(2 * float(macs) / card.flops_of(graph, op), float(traffic) / card.bytes_per_second)
        for op, macs, traffic in zip(graph.ops, costs.macs, costs.traffic_bytes, strict=True)
    }
    tier = card.tier if options.offloads else None
    return Pricing(seconds, Basis.ROOFLINE, workspace_on(graph, card), tier)


def workspace_on(graph: Graph, card: Card) -> dict[str, int]:
    """Bytes by op id, from the table of the card's kind: an estimate."""
    if card.kind == "cpu":
        return estimated_workspaces(graph)
    return {
        op: size for op, requests in workspace_requests_on(graph, card).items() if (size := peak_of(requests))
    }


def workspace_requests_on(graph: Graph, card: Card) -> dict[str, Workspace]:
    """What the kernels of each op ask a CUDA device for, in their order."""
    if not card.is_cuda:
        return {}
    return {op.id: cuda_workspace_of(site_of(graph, op))(card.chip) for op in graph.ops}
