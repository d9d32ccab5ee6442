"""What it costs to ask before each step whether its plan still applies.

    python -m benchmarks.guards [NET ...]

Each round runs one fitted step and asks its guard once, both by the thread's processor time; figures are
medians over rounds with quartiles. The last case is a model of a thousand small modules.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import thread_time

import torch
from torch import Tensor, nn

import stowplan
from benchmarks.results import Study, spread_of
from stowplan import Search
from tests.support.nets import NETS

_NETS = ("gpt", "resnet50")
_ROUNDS = 7
_MANY = 200  # rounds of what takes less than a millisecond
_STUDY = Study("guards")


def main() -> None:
    """Print a line per network, and one for a thousand modules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(_NETS), metavar="NET")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.nets:
        example = NETS[name].build("real")
        _share_of_a_step(name, example.model, example.args)
    _thousand_modules()


def _share_of_a_step(name: str, model: nn.Module, args: tuple[object, ...]) -> None:
    fitted = stowplan.fit(model, args, budget="64GiB", search=Search(moves=3), allow=("recompute",))
    ask = _asking(fitted, args)

    def step() -> None:
        fitted.zero_grad(set_to_none=True)
        loss: Tensor = fitted(*args)
        loss.backward()  # type: ignore[no-untyped-call]

    step()
    pairs = [(_timed(ask), _timed(step)) for _ in range(_ROUNDS)]
    shares = [guard / whole for guard, whole in pairs]
    _STUDY.tell(name, "stowplan", "guard", median(shares), "of a fitted step", spread_of(shares))
    seconds = median(guard for guard, _ in pairs)
    print(f"{name:12} guard {1e6 * seconds:7.0f} us, {median(shares):.4%} of a fitted step", flush=True)


def _thousand_modules() -> None:
    blocks = [(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(4)) for _ in range(200)]
    model = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
    args = (torch.randn(2, 4),)
    ask = _asking(
        stowplan.fit(model, args, budget="1GiB", search=Search(moves=3), allow=("recompute",)), args
    )
    times = [_timed(ask) for _ in range(_MANY)]
    count = len(list(model.modules()))
    _STUDY.tell(f"{count} modules", "stowplan", "guard", median(times), "s", spread_of(times))
    low, high = spread_of(times)
    print(
        f"{count} modules guard {1e6 * median(times):.0f} us ({1e6 * low:.0f} to {1e6 * high:.0f})",
        flush=True,
    )


def _asking(fitted: nn.Module, args: tuple[object, ...]) -> Callable[[], object]:
    """Everything that happens in a call before the step runs: the kind of the call, and the guard."""
    fitting = fitted.__dict__["_fitting"]
    return lambda: fitting.step_for(fitted, args, {})


def _timed(work: Callable[[], object]) -> float:
    begun = thread_time()
    work()
    return thread_time() - begun


if __name__ == "__main__":
    main()
