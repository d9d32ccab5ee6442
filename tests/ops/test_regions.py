"""Region rules against the true dependence of every output element on every input element."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

import pytest
import torch
from torch import Tensor

from stowplan.geometry import Rect
from stowplan.ops.regions import DimKind, Partial, Relation, regions_of
from stowplan.ops.regions.rules import rules
from tests.support.aten_samples import ATEN_SAMPLERS
from tests.support.aten_spellings import UNCHECKED, aten_types, example_of
from tests.support.document_samples import DOCUMENT_SAMPLERS
from tests.support.op_samples import Sample, Sampler, aten, numbers
from tests.support.regions import Needed, dependence, needed_rect

pytestmark = pytest.mark.torch

SAMPLERS: Mapping[str, Sampler] = {**ATEN_SAMPLERS, **DOCUMENT_SAMPLERS}
INTERVALS_PER_FAMILY = 120_000 // len(SAMPLERS) + 1
SAMPLES_PER_FAMILY = 30
RECTS_PER_OUTPUT = 20

# The share of intervals that are exact in what is drawn, so that a rule that asks for more is seen. It is
# below one where what is read depends on values (indices, labels, conditions, maxima), a stride skips
# elements, or a group of channels is needed as one.
AT_LEAST_EXACT = {
    "adaptive_pool": 0.991,
    "attention": 0.969,
    "batch_norm": 0.915,
    "chainer_convolution": 0.965,
    "choosing": 0.73,
    "class_loss": 0.547,
    "convolution": 0.922,
    "indexing": 0.619,
    "interpolation": 0.924,
    "max_pool": 0.845,
    "pixel_shuffle": 0.905,
    "pointwise": 0.977,
    "reduction": 0.961,
    "reshape": 0.971,
    "sized_interpolation": 0.892,
    "tensorflow": 0.982,
}

# Flat indices and mirrors turn back, so that one part of an input serves outputs in several places.
TURNING = ("reshape", "repeating", "pad")

Pull = Callable[[Rect], tuple[Rect | None, ...]]


@dataclass(slots=True)
class Tally:
    """Intervals checked, those that are exact, and what was needed but not pulled."""

    intervals: int = 0
    exact: int = 0
    missed: list[str] = field(default_factory=list)

    def compare(self, needed: Rect, pulled: Rect | None, size: tuple[int, ...], where: str) -> None:
        """Count one input of one output rect."""
        inside = (pulled or needed.clip([0] * needed.ndim)).clip(size)
        if not inside.contains(needed):
            self.missed.append(f"{where}: needs {needed}, pulls {pulled}")
        self.intervals += needed.ndim
        if inside.is_empty and needed.is_empty:
            self.exact += needed.ndim
        else:
            ends = zip(needed.lo, inside.lo, needed.hi, inside.hi, strict=True)
            self.exact += sum(a == b and c == d for a, b, c, d in ends)


def samples(name: str) -> Iterator[Sample]:
    """Samples of a family, the same every time, without end."""
    index = 0
    while True:
        seed = zlib.crc32(f"{name} {index}".encode())
        torch.default_generator.manual_seed(seed)
        yield SAMPLERS[name](Random(seed))
        index += 1


def few_samples(name: str) -> Iterator[Sample]:
    return islice(samples(name), 12)


def relations(sample: Sample) -> Iterator[tuple[int, Relation]]:
    """The outputs that have elements, with their relations."""
    regions = regions_of(sample.site())
    assert not regions.barrier, regions.barrier
    return ((i, relation) for i, relation in enumerate(regions.outputs) if 0 not in relation.shape)


def rects(random: Random, shape: tuple[int, ...], count: int = RECTS_PER_OUTPUT) -> Iterator[Rect]:
    """The whole tensor, and random rects in it."""
    yield Rect.of_shape(shape)
    for _ in range(count):
        lo = tuple(random.randrange(size) for size in shape)
        yield Rect(lo, tuple(random.randint(low + 1, size) for low, size in zip(lo, shape, strict=True)))


def check(sample: Sample, shape: tuple[int, ...], pull_of: Pull, needs: list[Needed], tally: Tally) -> None:
    """Compare what is pulled for many rects of an output with what they need."""
    for rect in rects(Random(1), shape):
        for position, (needed, pulled) in enumerate(zip(needs, pull_of(rect), strict=True)):
            size = tuple(sample.tensors[position].shape)
            where = f"{sample.type}{dict(sample.attributes)} {rect} of input {position} {size}"
            tally.compare(needed_rect(needed, rect), pulled, size, where)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.slow
def test_nothing_needed_lies_outside_pull(name: str) -> None:
    tally, drawn = Tally(), 0
    for sample in samples(name):
        for output, relation in relations(sample):
            check(sample, relation.shape, relation.pull, dependence(sample, output), tally)
        drawn += 1
        if drawn >= SAMPLES_PER_FAMILY and tally.intervals >= INTERVALS_PER_FAMILY:
            break
    assert not tally.missed, "\n".join(tally.missed[:5])
    exact = tally.exact / tally.intervals
    print(f"{name}: {tally.intervals} intervals of {drawn} ops, {exact:.1%} exact")
    assert exact >= AT_LEAST_EXACT.get(name, 0.999)


@pytest.mark.slow
def test_every_aten_op_with_a_rule_is_checked_by_some_call() -> None:
    """Those that no family draws have an example each; a new entry fails here until it has one."""
    drawn = {s.type for name in ATEN_SAMPLERS for s in islice(samples(name), SAMPLES_PER_FAMILY)}
    others = [name for name in aten_types() if name in rules and name not in drawn | UNCHECKED]
    tally = Tally()
    for name in others:
        torch.default_generator.manual_seed(0)
        sample = example_of(name)
        for output, relation in relations(sample):
            check(sample, relation.shape, relation.pull, dependence(sample, output), tally)
    assert not tally.missed, "\n".join(tally.missed[:5])
    print(f"{len(drawn)} drawn and {len(others)} other ATen ops, {tally.intervals} more intervals")


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.slow
def test_what_push_gives_can_be_produced(name: str) -> None:
    random = Random(2)
    for sample in few_samples(name):
        for output, relation in relations(sample):
            needs = dependence(sample, output)
            parts = [next(rects(random, tuple(t.shape), 0)) for t in sample.tensors]
            for position, tensor in enumerate(sample.tensors):
                for part in rects(random, tuple(tensor.shape), 6):
                    given = (*parts[:position], part, *parts[position + 1 :])
                    made = relation.push(given)
                    assert made is None or produces(needs, given, made), (sample.type, given, made)


def produces(needs: list[Needed], parts: tuple[Rect, ...], outputs: Rect) -> bool:
    """Whether the parts hold everything that the outputs need."""
    return all(part.contains(needed_rect(needed, outputs)) for needed, part in zip(needs, parts, strict=True))


@pytest.mark.parametrize("name", SAMPLERS)
def test_pushing_what_was_pulled_gives_the_outputs_back(name: str) -> None:
    for sample in few_samples(name):
        for _, relation in relations(sample):
            for rect in rects(Random(3), relation.shape, 6):
                pulled = relation.pull(rect)
                made = relation.push(pulled)
                if name not in TURNING and None not in pulled:
                    assert made is not None
                    assert made.contains(rect), (sample.type, dict(sample.attributes), rect, made)


@pytest.mark.parametrize("name", SAMPLERS)
def test_kinds_keep_their_word(name: str) -> None:
    for sample in few_samples(name):
        for _, relation in relations(sample):
            for dim, kind in enumerate(relation.kinds()):
                assert (kind is DimKind.WHOLE) == bool(relation.whole.get(dim))
                for cut in range(1, relation.shape[dim]):
                    check_cut(relation, dim, cut)


def check_cut(relation: Relation, dim: int, cut: int) -> None:
    """Tiles of a FREE dim need disjoint parts of an input, tiles of a SHARED dim the same."""
    size = relation.shape[dim]
    first, second = (with_span(relation.shape, dim, span) for span in ((0, cut), (cut, size)))
    for need in relation.needs:
        if need is None:
            continue
        left, right = need.pull(first), need.pull(second)
        if need.kind_of(dim) is DimKind.SHARED and need.within is None:
            assert left == right
        if need.kind_of(dim) is DimKind.FREE and left is not None and right is not None:
            assert left.intersect(right).is_empty


def with_span(shape: tuple[int, ...], dim: int, span: tuple[int, int]) -> Rect:
    lo, hi = [0] * len(shape), list(shape)
    lo[dim], hi[dim] = span
    return Rect(tuple(lo), tuple(hi))


@pytest.mark.parametrize("shrink", ["low", "high"])
def test_the_check_sees_a_halo_one_too_small(shrink: str) -> None:
    target = torch.ops.aten.convolution.default
    weight = numbers(1, 1, 3, 3)
    sample = aten(target, numbers(1, 1, 6, 6), weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    relation = regions_of(sample.site()).outputs[0]

    def wrong(outputs: Rect) -> tuple[Rect | None, ...]:
        image, weights = relation.pull(outputs)
        assert image is not None
        step = (0, 0, 1, 0)
        lower = replace(image, lo=tuple(a + b for a, b in zip(image.lo, step, strict=True)))
        upper = replace(image, hi=tuple(a - b for a, b in zip(image.hi, step, strict=True)))
        return (lower if shrink == "low" else upper), weights

    right, tally = Tally(), Tally()
    check(sample, relation.shape, relation.pull, dependence(sample, 0), right)
    check(sample, relation.shape, wrong, dependence(sample, 0), tally)
    assert not right.missed
    assert tally.missed


@pytest.mark.parametrize("groups", [-1, 0, 2**64])
def test_an_op_with_impossible_groups_is_a_barrier(groups: int) -> None:
    """As a damaged file may have them."""
    target = torch.ops.aten.convolution.default
    sample = aten(
        target, numbers(1, 2, 6, 6), numbers(2, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2
    )
    site = sample.site()
    damaged = replace(site, op=replace(site.op, attributes={**site.op.attributes, "groups": groups}))
    assert "groups" in regions_of(damaged).barrier


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_result_with_a_dim_too_few_can_still_be_asked(name: str) -> None:
    """As a damaged file may have it: regions then speak of no dim that is not there."""
    site = SAMPLERS[name](Random(0)).site()
    outputs = tuple(replace(tensor, shape=(tensor.shape or ())[:-1]) for tensor in site.outputs)
    for relation in regions_of(replace(site, outputs=outputs)).outputs:
        relation.pull(Rect((0,) * len(relation.shape), relation.shape))


MERGES: Mapping[Partial, Callable[[Tensor, Tensor, float], Tensor]] = {
    Partial.SUM: lambda one, other, _: one + other,
    Partial.MEAN: lambda one, other, share: share * one + (1 - share) * other,
    Partial.MAX: lambda one, other, _: torch.maximum(one, other),
    Partial.MIN: lambda one, other, _: torch.minimum(one, other),
}


@pytest.mark.parametrize(
    "name", ["reduction", "matrix_product", "pointwise_loss", "adaptive_pool", "megengine"]
)
def test_merged_partials_are_the_result(name: str) -> None:
    merged = 0
    for sample in few_samples(name):
        reduction = regions_of(sample.site()).outputs[0].reduction
        if reduction is None or reduction.partial not in MERGES:
            continue
        for order in range(len(reduction.dims[0])):
            dims = {position: dims[order] for position, dims in reduction.dims.items()}
            size = sample.tensors[0].shape[dims[0] or 0]
            cut = size // 2
            if cut:
                parts = [cut_tensors(sample, dims, span) for span in ((0, cut), (cut, size))]
                one, other = (sample.outputs(part)[0] for part in parts)
                whole = sample.outputs()[0]
                torch.testing.assert_close(MERGES[reduction.partial](one, other, cut / size), whole)
                merged += 1
    assert merged


def cut_tensors(sample: Sample, dims: Mapping[int, int | None], span: tuple[int, int]) -> list[Tensor]:
    """The sample's tensors, those with a reduced dim cut to `span` of it."""
    low, high = span
    return [
        tensor if (dim := dims.get(position)) is None else tensor.narrow(dim, low, high - low)
        for position, tensor in enumerate(sample.tensors)
    ]
