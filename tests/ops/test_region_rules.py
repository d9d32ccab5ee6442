"""Region rules by example: padding, barriers, reasons, parts."""

import re
from random import Random

import pytest
import torch
import torch.nn.functional as F

from stowplan.geometry import Rect
from stowplan.ir import Attribute
from stowplan.ops.regions import DimKind, Partial, pull, push, regions_of
from stowplan.ops.regions.relation import Need, Reduction, Regions, Relation
from stowplan.ops.regions.rules import rules, whole
from stowplan.ops.table import Site, shape_of
from stowplan.ops.windows import output_sizes, windows_of
from tests.support.aten_samples import ATEN_SAMPLERS
from tests.support.op_samples import Sample, aten, numbers

pytestmark = pytest.mark.torch


def test_a_norm_needs_only_its_place_once_its_statistics_are_known() -> None:
    sample = aten(torch.ops.aten.native_group_norm.default, numbers(2, 4, 6), None, None, 2, 4, 6, 2, 1e-5)
    relation = regions_of(sample.site()).outputs[0]
    assert relation.reduction is not None
    assert relation.reduction.after is not None
    rect = Rect((0, 1, 2), (1, 2, 4))
    assert relation.pull(rect) == (Rect((0, 0, 0), (1, 2, 6)),)
    assert relation.reduction.after.pull(rect) == (rect,)
    assert relation.reduction.partial is Partial.MOMENTS


def test_padding_is_what_reaches_past_the_border_and_has_the_ops_value() -> None:
    pool = torch.ops.aten.max_pool2d_with_indices.default
    sample = aten(pool, numbers(1, 1, 6, 6), [3, 3], [2, 2], [1, 1])
    relation = regions_of(sample.site()).outputs[0]
    (needed,) = relation.pull(Rect((0, 0, 0, 1), (1, 1, 2, 3)))
    assert needed == Rect((0, 0, -1, 1), (1, 1, 4, 6))
    assert needed.overhang((1, 1, 6, 6)) == ((0, 0), (0, 0), (1, 0), (0, 0))
    assert relation.needs[0] is not None
    assert relation.needs[0].fill == float("-inf")


def test_an_op_without_a_rule_is_a_barrier_and_says_so() -> None:
    sample = aten(torch.ops.aten.sort.default, numbers(3, 4))
    regions = regions_of(sample.site())
    assert regions.barrier == "aten.sort.default has no region rule"
    assert regions.outputs[0].kinds() == (DimKind.WHOLE, DimKind.WHOLE)
    assert regions.outputs[0].whole[1] == regions.barrier
    assert pull(sample.site(), Rect((1, 1), (2, 2))) == (Rect((0, 0), (3, 4)),)
    assert push(sample.site(), (Rect((0, 0), (3, 3)),)) is None


def test_a_rule_that_lacks_an_attribute_is_a_barrier_that_names_it() -> None:
    sample = Sample(
        "Conv2D", (numbers(1, 4, 4, 1), numbers(3, 3, 1, 1)), {}, lambda image, _: image[:, 1:3, 1:3]
    )
    assert "'strides' is None" in regions_of(sample.site()).barrier


KERNEL = numbers(1, 1, 3, 3)
UNKNOWN = [
    (aten(torch.ops.aten.matmul.default, numbers(2, 3), numbers(3)), "multiplies by a vector"),
    (aten(torch.ops.aten.index.Tensor, numbers(3, 4), [torch.tensor([True, False, True])]), "by a mask"),
    (aten(torch.ops.aten.view.default, numbers(0, 4), [0, 2, 2]), "reshapes a tensor without elements"),
    (aten(torch.ops.aten.repeat_interleave.self_int, numbers(2, 2), 3), "without a dim flattens"),
    (aten(torch.ops.aten.roll.default, numbers(2, 2), [1]), "without dims flattens"),
    (Sample("aten.convolution.default", (numbers(1, 6, 6), KERNEL), {}, F.conv2d), "without a batch dim"),
    (
        Sample("aten.pad.default", (numbers(3),), {"mode": "odd", "pad": (1, 1)}, lambda x: F.pad(x, (1, 1))),
        "unknown mode 'odd'",
    ),
    (Sample("Reduce", (numbers(2, 3),), {}, lambda x: x.sum(1)), "changes the number of dims"),
    (
        aten(torch.ops.aten.cross_entropy_loss.default, numbers(2, 3), numbers(2, 3).softmax(1)),
        r"reads scores \(2, 3\) with labels \(2, 3\)",
    ),
    (Sample("Convolution2DFunction", (numbers(1, 1, 6, 6), KERNEL), {}, F.conv2d), "'groups' is None"),
    (Sample("aten.permute.default", (numbers(2, 3),), {"dims": "odd"}, torch.t), "'dims' is 'odd'"),
    (Sample("GetItem", (numbers(3, 3),), {"slices": ("list",)}, lambda x: x[[0, 2]]), "which is not slices"),
    (
        Sample("Transpose", (numbers(2, 3, 3, 3),), {}, lambda x: x.permute(0, 2, 3, 1)),
        "does not tell the order",
    ),
    (Sample("Transpose", (numbers(2, 3),), {}, torch.t), "does not tell the order"),
    (Sample("BiasAdd", (numbers(2, 3, 4, 3), numbers(3)), {}, torch.add), "does not tell which dim"),
    (
        Sample(
            "filter",
            (numbers(1, 2, 5, 5), numbers(3, 1, 1, 2, 2, 2, 2, 2)),
            {},
            lambda *_: numbers(1, 3, 2, 2),
        ),
        "its stride is not known",
    ),
]


@pytest.mark.parametrize(("sample", "reason"), UNKNOWN, ids=[reason for _, reason in UNKNOWN])
def test_what_an_op_does_not_tell_is_a_barrier_with_the_reason(sample: Sample, reason: str) -> None:
    regions = regions_of(sample.site())
    assert re.search(reason, regions.barrier)
    assert {kind for relation in regions.outputs for kind in relation.kinds()} <= {DimKind.WHOLE}


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        *((f"{kind}_pad{{}}d.default", (1, 2, 3)) for kind in ("reflection", "replication")),
        *((f"{kind}avg_pool{{}}d.default", (2, 3)) for kind in ("", "adaptive_", "_adaptive_")),
        ("adaptive_max_pool{}d.default", (2, 3)),
        ("max_pool{}d_with_indices.default", (2, 3)),
        *((f"{kind}{{}}d.{how}", (1, 2, 3)) for kind in ("upsample_nearest",) for how in ("default", "vec")),
    ],
)
def test_a_family_has_a_rule_in_each_number_of_dims(family: str, dims: tuple[int, ...]) -> None:
    assert [n for n in dims if f"aten.{family.format(n)}" not in rules] == []


@pytest.mark.parametrize(
    ("shape", "channel", "attributes"),
    [
        ((2, 3, 4, 5), 1, {}),
        ((2, 3, 4, 5), 3, {}),
        ((2, 3, 4, 3), 1, {"data_format": "NCHW"}),
        ((2, 3, 4, 3), 3, {"data_format": "NHWC"}),
    ],
)
def test_a_bias_lies_along_the_dim_it_fits_or_is_told(
    shape: tuple[int, ...], channel: int, attributes: dict[str, Attribute]
) -> None:
    bias = numbers(shape[channel])
    sample = Sample("BiasAdd", (numbers(*shape), bias), attributes, lambda x, _: x)
    at = tuple(2 if dim == channel else 0 for dim in range(4))
    here = Rect(at, tuple(index + 1 for index in at))
    assert pull(sample.site(), here) == (here, Rect((2,), (3,)))


def test_an_empty_vector_joins_anything_and_is_never_needed() -> None:
    sample = aten(torch.ops.aten.cat.default, [numbers(0), numbers(2, 3)], 1)
    assert pull(sample.site(), Rect((0, 1), (2, 2))) == (None, Rect((0, 1), (2, 2)))


@pytest.mark.parametrize(
    ("sample", "fill"),
    [
        (aten(torch.ops.aten.constant_pad_nd.default, numbers(4), [1, 1], 2.5), 2.5),
        (aten(torch.ops.aten.reflection_pad1d.default, numbers(1, 4), [1, 1]), None),
        (aten(torch.ops.aten.avg_pool2d.default, numbers(1, 1, 4, 4), [2, 2]), 0.0),
        (aten(torch.ops.aten.max_pool2d_with_indices.default, numbers(1, 1, 4, 4), [2, 2]), float("-inf")),
    ],
    ids=["constant", "mirror", "average", "maximum"],
)
def test_padding_has_the_value_of_the_op(sample: Sample, fill: float | None) -> None:
    need = regions_of(sample.site()).outputs[0].needs[0]
    assert need is not None
    assert need.fill == fill


@pytest.mark.parametrize(
    ("sample", "dim", "reason"),
    [
        (aten(torch.ops.aten._softmax.default, numbers(2, 3, 4, 5), -1, False), 3, "softmax runs over dim 3"),
        (
            aten(
                torch.ops.aten._native_batch_norm_legit.no_stats,
                numbers(2, 3, 4),
                None,
                None,
                True,
                0.1,
                1e-5,
            ),
            0,
            "batch norm takes its statistics over dims 0, 2",
        ),
        (
            aten(torch.ops.aten.view.default, numbers(2, 12), [2, 3, 4]),
            2,
            "a reshape lays dim 2 inside dim 1",
        ),
    ],
    ids=["softmax", "batch norm", "reshape"],
)
def test_a_dim_that_cannot_be_tiled_has_a_reason(sample: Sample, dim: int, reason: str) -> None:
    relation = regions_of(sample.site()).outputs[0]
    assert relation.kind_of(dim) is DimKind.WHOLE
    assert relation.whole[dim] == reason


@pytest.mark.parametrize(("heads", "kind"), [(4, DimKind.FREE), (2, DimKind.HALO)])
def test_only_heads_that_queries_share_are_read_by_several_tiles(heads: int, kind: DimKind) -> None:
    target = torch.ops.aten.scaled_dot_product_attention.default
    sample = aten(
        target, numbers(1, 4, 6, 4), *(numbers(1, heads, 6, 4) for _ in "kv"), None, enable_gqa=True
    )
    assert regions_of(sample.site()).outputs[0].kind_of(1) is kind


def test_what_parts_of_a_concatenation_give_reaches_over_the_whole_of_the_others() -> None:
    sample = aten(torch.ops.aten.cat.default, [numbers(3, 2), numbers(2, 2)])
    first, second = Rect((0, 0), (3, 2)), Rect((0, 0), (2, 2))
    assert push(sample.site(), (Rect((1, 0), (3, 2)), second)) == Rect((1, 0), (5, 2))
    assert push(sample.site(), (first, Rect((0, 0), (1, 2)))) == Rect((0, 0), (4, 2))


def test_causal_attention_reads_keys_up_to_its_own_query() -> None:
    query, key, value = numbers(1, 2, 6, 4), numbers(1, 1, 6, 4), numbers(1, 1, 6, 4)
    target = torch.ops.aten.scaled_dot_product_attention.default
    sample = aten(target, query, key, value, None, 0.0, True, enable_gqa=True)
    needed = pull(sample.site(), Rect((0, 1, 2, 0), (1, 2, 4, 4)))
    assert needed == (
        Rect((0, 1, 2, 0), (1, 2, 4, 4)),
        Rect((0, 0, 0, 0), (1, 1, 4, 4)),
        Rect((0, 0, 0, 0), (1, 1, 4, 4)),
    )


def test_a_concatenation_needs_only_the_parts_it_shows() -> None:
    sample = aten(torch.ops.aten.cat.default, [numbers(2, 3), numbers(2, 4)], 1)
    assert pull(sample.site(), Rect((0, 0), (2, 2))) == (Rect((0, 0), (2, 2)), None)
    assert pull(sample.site(), Rect((0, 2), (1, 5))) == (Rect((0, 2), (1, 3)), Rect((0, 0), (1, 2)))
    assert push(sample.site(), (Rect((0, 0), (2, 3)), None)) == Rect((0, 0), (2, 3))


def test_outputs_outside_the_tensor_are_never_pulled_for() -> None:
    sample = aten(torch.ops.aten.relu.default, numbers(4, 4))
    assert pull(sample.site(), Rect((-2, 3), (2, 9))) == (Rect((0, 3), (2, 4)),)
    assert pull(sample.site(), Rect((4, 0), (6, 4))) == (None,)


def test_a_second_rule_for_a_type_is_refused() -> None:
    with pytest.raises(ValueError, match="has an entry already"):
        rules.entry("aten.relu.default")(regions_of)


@pytest.mark.parametrize(
    ("inputs", "reduced"), [(1, {0: (1,), 1: (0,)}), (1, {0: (2,)}), (2, {0: (0,), 1: (0, 1)})]
)
def test_a_rule_that_reduces_what_the_op_does_not_have_is_a_barrier(
    monkeypatch: pytest.MonkeyPatch, inputs: int, reduced: dict[int, tuple[int, ...]]
) -> None:
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))

    @rules.entry("tests.odd_sum")
    def odd_sum(site: Site) -> Regions:
        needs = tuple(Need(whole(shape_of(tensor))) for tensor in site.inputs)
        return Regions((Relation((), needs, reduction=Reduction(Partial.SUM, reduced)),))

    sample = Sample("tests.odd_sum", (numbers(2, 3),) * inputs, {}, lambda x, *_: x.sum())
    assert "is no usual 'tests.odd_sum'" in regions_of(sample.site()).barrier


def test_only_partial_results_over_some_dims_are_merged() -> None:
    largest = aten(torch.ops.aten.max.dim, numbers(3, 4), 1)  # with a place, which does not merge
    nothing = aten(torch.ops.aten.sum.default, numbers())
    one = aten(torch.ops.aten.amax.default, numbers(3, 4), [1])
    reductions = [regions_of(sample.site()).outputs[0].reduction for sample in (largest, nothing, one)]
    assert reductions == [None, None, Reduction(Partial.MAX, {0: (1,)})]


@pytest.mark.parametrize("name", ["convolution", "max_pool", "average_pool"])
def test_windows_make_as_many_outputs_as_the_op(name: str) -> None:
    for seed in range(60):
        torch.manual_seed(seed)
        sample = ATEN_SAMPLERS[name](Random(seed))
        windows = windows_of(sample.site())
        inputs, outputs = (tuple(t.shape[-len(windows) :]) for t in (sample.tensors[0], sample.outputs()[0]))
        assert output_sizes(windows, inputs) == outputs, dict(sample.attributes)


@pytest.mark.parametrize("name", ["upsample_nearest1d", "_upsample_nearest_exact1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_rounding_of_positions_never_leaves_the_pull(name: str, dtype: torch.dtype) -> None:
    random = Random(0)
    sizes = [(a, b) for a in range(1, 20) for b in range(1, 20)]
    sizes += [(random.randint(20, 3000), random.randint(20, 3000)) for _ in range(20)]
    for inputs, outputs in sizes:
        image = torch.arange(inputs, dtype=dtype).view(1, 1, -1)
        sample = aten(getattr(torch.ops.aten, name).vec, image, [outputs], None)
        need = regions_of(sample.site()).outputs[0].needs[0]
        assert need is not None
        for index, source in enumerate(sample.outputs()[0].flatten().tolist()):
            low, high = need.dims[2].pull(Rect((0, 0, index), (1, 1, index + 1)))
            assert low <= source < high, (inputs, outputs, index)
            assert high - low <= 2
