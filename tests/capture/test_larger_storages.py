"""What is known of kernels that leave results in larger storages is what they do, op by op."""

from collections.abc import Callable, Iterable, Mapping
from random import Random

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stowplan.capture.program import extra_bytes
from stowplan.capture.stand_ins import StorageBook
from tests.support.aten_samples import ATEN_SAMPLERS

pytestmark = pytest.mark.torch

aten = torch.ops.aten


class Unexplained(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves __init_subclass__ untyped
    """Notes the bytes of new storages that neither the results' spans nor the table accounts for, by op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # so is this
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        book, named = StorageBook(lambda: 0), dict(kwargs or {})
        views, named_views = pytree.tree_map_only(Tensor, book.view_of, (args, named))
        given = len(book.lifetimes)
        made = func(*args, **named)
        leaves = pytree.tree_leaves(made)
        results = [book.view_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        extra = dict(extra_bytes(func, views, named_views, results))
        for view in results:
            if view is not None and view.storage >= given:
                known = view.extent_bytes() + extra.get(view, 0)
                if book.lifetimes[view.storage].nbytes != known:
                    self.bytes[str(func)] = book.lifetimes[view.storage].nbytes - known
        return made


def unexplained_bytes(run: Callable[..., object], *args: object) -> dict[str, int]:
    """What one call leaves without an account."""
    watch = Unexplained()
    with watch:
        run(*args)
    return watch.bytes


@pytest.mark.parametrize("name", ATEN_SAMPLERS)
def test_sampled_ops(name: str) -> None:
    for seed in range(8):
        assert unexplained_bytes(ATEN_SAMPLERS[name](Random(seed)).outputs) == {}


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shapes", [((4, 8), (4, 8)), ((4, 1), (1, 8)), ((3,), ())])
@pytest.mark.parametrize("loss", [aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss], ids=str)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # huber_loss in 2.15
def test_losses(loss: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], reduction: int) -> None:
    one, other = (torch.rand(shape) for shape in shapes)
    assert unexplained_bytes(loss, one, other, reduction) == {}


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_losses_of_probabilities_and_margins(dtype: torch.dtype, reduction: int) -> None:
    one, other = torch.rand(4, 8, dtype=dtype), torch.rand(4, 8, dtype=dtype)
    assert unexplained_bytes(aten.binary_cross_entropy, one, other, None, reduction) == {}
    assert unexplained_bytes(aten.soft_margin_loss, one, other, reduction) == {}


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 3, 9, 9), (3, 9, 9), (1, 3, 9, 9)])
def test_windows_as_columns_and_back(shape: tuple[int, ...], stride: int) -> None:
    image, windows = torch.rand(shape), ([3, 3], [1, 1], [1, 1], [stride, stride])
    columns = aten.im2col(image, *windows)
    assert unexplained_bytes(aten.im2col, image, *windows) == {}
    assert (
        unexplained_bytes(aten.im2col, image.expand(2, 3, 9, 9) if image.shape[0] == 1 else image, *windows)
        == {}
    )
    assert unexplained_bytes(aten.col2im, columns, [9, 9], *windows) == {}


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("includes_last", [False, True])
def test_bags(mode: int, includes_last: bool) -> None:
    offsets = torch.tensor([0, 2, 6] if includes_last else [0, 2])
    bag = torch.rand(10, 5), torch.arange(6), offsets, False, mode, False, None, includes_last
    assert unexplained_bytes(aten._embedding_bag, *bag) == {}
