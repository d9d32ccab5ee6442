"""The networks of the benchmarks train, repeat under a seed, and are the networks they are named after."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from stowplan.errors import BadUse
from tests.support.nets import NETS, Example

pytestmark = pytest.mark.torch

PUBLISHED_PARAMETERS = {
    "resnet50": 25_557_032,
    "efficientnet": 5_288_548,
    "densenet121": 7_978_856,
    "vgg16": 138_357_544,
    "vit": 22_050_664,
    "swin": 28_288_354,
    "gpt": 124_439_808,
    "t5": 60_506_624,
    "hf_t5": 60_506_624,
}


def step(example: Example) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one training step, with the generator seeded for its dropouts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        loss = example.model(*example.args)
        names, parameters = zip(*example.model.named_parameters(), strict=True)
        return loss, dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def parameter_count(example: Example) -> int:
    return sum(parameter.numel() for parameter in example.model.parameters())


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    loss, gradients = step(NETS[name].build("tiny"))
    assert loss.shape == ()
    assert loss.isfinite()
    for parameter, gradient in gradients.items():
        assert gradient.isfinite().all(), parameter
        assert gradient.any(), parameter


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_the_same_seed_gives_the_same_step_and_another_seed_another(name: str) -> None:
    (loss, gradients), (again, gradients_again) = (step(NETS[name].build("tiny", seed=3)) for _ in range(2))
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[key], gradients_again[key]) for key in gradients)
    assert not torch.equal(loss, step(NETS[name].build("tiny", seed=4))[0])


@pytest.mark.parametrize("name", NETS)
@pytest.mark.slow
def test_building_leaves_the_callers_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    NETS[name].build("tiny")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", NETS)
def test_the_real_size_builds_without_memory(name: str) -> None:
    example = NETS[name].build("real", device="meta")
    tensors = (*example.model.parameters(), *example.model.buffers(), *example.args)
    assert all(tensor.is_meta for tensor in tensors)


@pytest.mark.parametrize("name", NETS)
def test_float64_reaches_weights_and_inputs(name: str) -> None:
    example = NETS[name].build("tiny", dtype=torch.float64)
    assert {argument.dtype for argument in example.args} <= {torch.float64, torch.int64}
    assert {gradient.dtype for gradient in step(example)[1].values()} == {torch.float64}


@pytest.mark.parametrize(("name", "count"), PUBLISHED_PARAMETERS.items())
@pytest.mark.slow
def test_parameter_counts_are_the_published_ones(name: str, count: int) -> None:
    assert parameter_count(NETS[name].build("real", device="meta")) == count


def test_unet_is_the_documents_network() -> None:
    example = NETS["unet"].build("real", device="meta", batch=8)
    assert example.args[0].shape == (8, 1, 572, 572)
    with FlopCounterMode(display=False) as counter:
        example.model(*example.args)
    assert 4 * parameter_count(example) == 124_401_416
    assert counter.get_total_flops() == 2 * 1_258_354_034_688


def test_settings_can_be_overridden_by_name() -> None:
    example = NETS["gpt"].build("tiny", batch=3, sequence=8)
    assert example.args[0].shape == (3, 8)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadUse, match="'gpt' has no setting resolution; it has batch, sequence"):
        NETS["gpt"].build("tiny", resolution=32)


def test_vgg_features_take_any_image() -> None:
    example = NETS["vgg16"].build("tiny", has_classifier=False, resolution=96)
    assert step(example)[0].isfinite()
