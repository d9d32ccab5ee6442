"""Large models are captured in the time and memory that a person waits for."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time

import pytest

from stowplan.analyse import facts_of
from stowplan.capture import capture
from stowplan.formats import chainer
from stowplan.ir import Kind, Op, Phase
from tests.support.nets import NETS
from tests.support.timing import timed

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
SAME_KIND = {
    "aten.relu.default": "ReLU",
    "aten.max_pool2d_with_indices.default": "MaxPooling2D",
    "aten.cat.default": "Concat",
    "aten.bernoulli.p": "Dropout",
    "aten.nll_loss2d_forward.default": "SoftmaxCrossEntropy",
}


def chainers_name(op: Op) -> str | None:
    """What Chainer calls an op of the U-Net; None for one that is only part of an op of Chainer's."""
    if op.type == "aten.convolution.default":
        return "Deconvolution2DFunction" if op.attributes["transposed"] else "Convolution2DFunction"
    if op.type == "aten.slice.Tensor":  # one for the height and one for the width
        return "GetItem" if op.attributes["dim"] == 2 else None
    return SAME_KIND.get(op.type)


@pytest.mark.slow
def test_the_unet_is_that_of_the_chainer_document(dump: Callable[[str], Path]) -> None:
    document = chainer.read(dump("chainer").read_text(), chainer.SavedView.RETAIN).graph
    graph = capture(*NETS["unet"].build("real", device="meta", batch=8)).graph
    expected, found = facts_of(document), facts_of(graph)
    assert found.costs.forward_macs == expected.costs.forward_macs == 1_258_354_034_688
    assert found.costs.step_macs == expected.costs.step_macs
    assert found.bytes_by_kind[Kind.PARAMETER] == expected.bytes_by_kind[Kind.PARAMETER] == 124_401_416
    counts = Counter(op.type for op in document.ops if op.phase is Phase.FORWARD)
    named = (chainers_name(op) for op in graph.ops if op.phase is Phase.FORWARD)
    assert Counter(name for name in named if name is not None) == counts


@timed
def test_the_unet_takes_little_time_and_memory() -> None:
    script = (
        "import resource, time; from tests.support.nets import NETS; from stowplan.capture import capture;"
        "step = NETS['unet'].build('real', device='meta', batch=8);"
        "begin = time.process_time(); capture(*step);"
        "print(time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, resident_bytes = map(float, done.stdout.split())
    assert seconds < 20
    assert resident_bytes < 1 << 30


@timed
def test_time_grows_with_the_layers_and_not_with_their_square() -> None:
    seconds = {}
    for layers in (2, 20):
        step = NETS["gpt"].build("tiny", device="meta", layers=layers)
        capture(*step)
        begin = process_time()
        capture(*step)
        seconds[layers] = process_time() - begin
    assert seconds[20] < 25 * seconds[2]
