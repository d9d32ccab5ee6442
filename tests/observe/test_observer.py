"""Loops of every kind in this process: their numbers stay, their parts are named, nothing is left behind."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.utils.checkpoint import checkpoint

import stowplan
from stowplan.observe.observer import Observer
from stowplan.observe.record import WatchRecord
from stowplan.torch_private import dispatch_modes
from tests.support.observing import observed

pytestmark = pytest.mark.torch

BATCH, WIDTH = 64, 128


class Block(nn.Module):
    def __init__(self, *, is_saved: bool = True) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.drop, self.is_saved = nn.Dropout(0.1), is_saved

    def inner(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.second(nn.functional.gelu(self.first(self.norm(x)))))
        return found

    def forward(self, x: Tensor) -> Tensor:
        if self.is_saved:
            return x + self.inner(x)
        recomputed: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return x + recomputed


class Net(nn.Sequential):
    def __init__(self, *, is_saved: bool = True) -> None:
        super().__init__(*(Block(is_saved=is_saved) for _ in range(3)))


def batches(count: int) -> Iterator[Tensor]:
    for _ in range(count):
        yield torch.randn(BATCH, WIDTH)


def usual() -> nn.Module:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for number, x in enumerate(batches(6)):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if number % 2:
            with torch.no_grad():
                model.eval()
                model(x)
                model.train()
    return model


def accumulating() -> nn.Module:
    model = Net(is_saved=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    for number, x in enumerate(batches(10)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean() / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def adversarial() -> nn.Module:
    generator, critic = Net(), Net()
    first, second = torch.optim.RMSprop(critic.parameters()), torch.optim.RMSprop(generator.parameters())
    for number, x in enumerate(batches(16)):
        fake = generator(x)
        mixed = (x + fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(outputs=critic(mixed).sum(), inputs=mixed, create_graph=True)
        first.zero_grad()
        (critic(fake.detach()).mean() - critic(x).mean() + slope.square().mean()).backward()
        first.step()
        if number % 3 == 2:
            second.zero_grad()
            critic(generator(x)).mean().backward()
            second.step()
    return nn.ModuleList([generator, critic])


def closures() -> nn.Module:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    x = torch.randn(BATCH, WIDTH)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(5):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return model


def by_hand() -> nn.Module:
    model = Net()
    for x in batches(14):
        model.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(1e-3 * parameter.grad)
    return model


LOOPS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "usual": (usual, "Net forward, backward, AdamW step"),
    "accumulating": (accumulating, "2 x (Net forward, backward), SGD step"),
    "adversarial": (
        adversarial,
        "3 x (Net #2 forward, autograd.grad, 2 x (Net #2 forward), backward, RMSprop step), Net forward,"
        " Net #2 forward, backward, RMSprop step",
    ),
    "closures": (closures, ""),
    "by hand": (by_hand, "Net forward, backward"),
}


def bits(loop: Callable[[], nn.Module]) -> list[Tensor]:
    torch.manual_seed(3)
    model = loop()
    return [*(parameter.detach().clone() for parameter in model.parameters()), torch.get_rng_state()]


def seen(folder: Path, loop: Callable[[], object]) -> WatchRecord:
    with observed(folder) as observer:
        torch.manual_seed(3)
        loop()
    return observer.record


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_keeps_its_numbers_and_is_found(name: str, tmp_path: Path) -> None:
    loop, text = LOOPS[name]
    alone = bits(loop)
    with observed(tmp_path) as observer:
        watched = bits(loop)
    assert all(map(torch.equal, alone, watched))
    record = observer.record
    assert not record.notes
    if text:
        assert (record.told, record.loop) == ("", text)
        assert record.peak is not None
        assert record.peak.nbytes == record.peaks[-1] == sum(share.nbytes for share in record.peak.kinds)


def test_an_optimizer_of_another_model_is_not_waited_for(tmp_path: Path) -> None:
    other = torch.optim.SGD(Net().parameters())
    assert seen(tmp_path, usual).loop == LOOPS["usual"][1]
    assert other.param_groups


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = torch.autograd.backward, torch.autograd.grad, torch.compile, sys.excepthook
    with observed(tmp_path):
        usual()
        assert not dispatch_modes()
        assert (torch.autograd.backward, torch.autograd.grad, torch.compile, sys.excepthook) == before
        nn.Linear(1, 1)(torch.zeros(1))
        tables = (
            *(torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks),
            *(torch_optimizers._global_optimizer_pre_hooks, torch_optimizers._global_optimizer_post_hooks),
        )
        assert not any(tables)


def kind_bytes(record: WatchRecord) -> dict[str, int]:
    assert record.peak is not None
    return {share.what: share.nbytes for share in record.peak.kinds}


def test_kinds_at_the_peak_are_counted_by_hand(tmp_path: Path) -> None:
    """In a process of its own, which holds nothing of other tests."""
    run = f"from pathlib import Path; from {__name__} import by_kinds; by_kinds(Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", run], cwd=Path(__file__).parents[2], check=True)


def by_kinds(folder: Path) -> None:
    """A linear layer, a ReLU and a square: what lives as backward begins can be written down."""
    n, m, model = 512, 256, nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    trained = sum(parameter.nbytes for parameter in model.parameters())

    def loop() -> None:
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        for _ in range(4):
            optimizer.zero_grad()
            y = model(torch.randn(n, m))
            y.square().mean().backward()
            optimizer.step()

    record = seen(folder, loop)
    kinds = kind_bytes(record)
    assert kinds["parameters"] == trained
    assert kinds["optimizer state"] == 2 * trained + 4 * 4  # and a count of steps for each
    assert kinds["inputs"] == 4 * n * m
    assert kinds["activations"] == 2 * 4 * n * m + 4  # results of ReLU and the last layer, and the loss
    assert record.peak is not None
    modules = {place.module: place.count for place in record.peak.places}
    assert modules["Sequential.*"] == 2
    assert all(place.file == __file__ for place in record.peak.places if place.kind == "activations")


def test_a_loss_that_is_a_module_is_no_evaluation(tmp_path: Path) -> None:
    def loop() -> None:
        model, criterion = nn.Linear(64, 1000), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            loss = criterion(model(torch.randn(256, 64)), torch.zeros(256, dtype=torch.long))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    record = seen(tmp_path, loop)
    assert kind_bytes(record)["activations"] >= 4 * 256 * 1000
    assert "evaluation" not in {*kind_bytes(record), *(phase.what for phase in record.phases)}
    assert record.peak is not None
    assert "CrossEntropyLoss" in {place.module for place in record.peak.places}


def test_an_allocation_in_backward_has_the_line_of_its_forward(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            wide: Tensor = self.narrow(x).repeat(1, 64)
            return wide.sin().square().sum()  # the widest

    def loop() -> None:
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            model(torch.randn(256, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()

    record = seen(tmp_path, loop)
    assert record.peak is not None
    assert record.peak.phase == "backward"
    lines = Path(__file__).read_text().splitlines()
    places = [place for place in record.peak.places if place.kind == "temporaries"]
    assert "the widest" in lines[places[0].line - 1]


class TestFindings:
    """Each thing that needs no plan is found in a loop that has it, and not in one that has not."""

    @staticmethod
    def loop(
        *,
        late: bool = False,
        in_place: bool = False,
        foreach: bool = False,
        graph: bool = False,
        kept: bool = False,
    ) -> Callable[[], None]:
        outputs = list[Tensor]()

        def run() -> None:
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.Adam(model.parameters(), foreach=foreach, fused=not foreach)
            for x in batches(5):
                y = model(x)
                if late:
                    optimizer.zero_grad()
                y.square().mean().backward()
                optimizer.step()
                if not late:
                    optimizer.zero_grad(set_to_none=not in_place)
                with torch.set_grad_enabled(graph):
                    model.eval()
                    model(torch.randn(4 * BATCH, WIDTH)).sum().item()
                    model.train()
                if kept:
                    outputs.append(torch.cat([y] * 4))

        return run

    def test_a_tidy_loop_has_none(self, tmp_path: Path) -> None:
        record = seen(tmp_path, self.loop())
        assert record.findings == []
        assert (record.growth_bytes, record.growth) == (0, [])
        assert record.peaks[0] == record.peaks[1]

    @pytest.mark.parametrize(
        ("flaw", "told", "line"),
        [
            ("late", "gradients outlive the step", "optimizer.zero_grad()"),
            ("in_place", "gradients outlive the step", "optimizer.step()"),
            ("foreach", "temporaries are the peak", "optimizer.step()"),
            ("graph", "nobody calls backward", "model(torch.randn(4 * BATCH, WIDTH))"),
            ("kept", "leaves tensors behind in a list of", "outputs.append"),
        ],
    )
    def test_a_flaw_is_told_with_its_line(self, flaw: str, told: str, line: str, tmp_path: Path) -> None:
        record = seen(tmp_path, self.loop(**{flaw: True}))
        (finding,) = [finding for finding in record.findings if told in finding.what]
        file, _, number = finding.where.rpartition(":")
        assert line in Path(file).read_text().splitlines()[int(number) - 1]
        assert record.growth_bytes == (4 * 4 * BATCH * WIDTH if flaw == "kept" else 0)
        tidy = seen(tmp_path, self.loop())
        if finding.peak_without_bytes is not None and flaw != "in_place":
            assert finding.peak_without_bytes == pytest.approx(tidy.peaks[-1], rel=0.05)
        assert finding.nbytes > 0


def test_a_fault_in_a_hook_ends_observing_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the observer's own error is written down, and the loop has its numbers."""
    alone = bits(usual)

    def fails(_: Observer) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Observer, "_note_gradients", fails)
    with observed(tmp_path) as observer:
        watched = bits(usual)
    assert all(map(torch.equal, alone, watched))
    assert "planted" in observer.record.told


def test_a_mode_of_the_scripts_own_is_left_alone(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        usual()
    with observed(tmp_path) as observer, FlopCounterMode(display=False) as watched:
        usual()
    assert watched.get_total_flops() == counter.get_total_flops()
    assert "dispatch mode of its own" in observer.record.told


def test_a_mode_entered_in_the_window_leaves_in_order(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def loop() -> nn.Module:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters())
        for x in batches(2):
            model(x).mean().backward()
            optimizer.step()
        with FlopCounterMode(display=False):  # observing ends in here
            for x in batches(3):
                model(x).mean().backward()
                optimizer.step()
        assert len(dispatch_modes()) <= 1
        for x in batches(2):
            model(x).mean().backward()
            optimizer.step()
        return model

    alone = bits(loop)
    with observed(tmp_path):
        watched = bits(loop)
        assert all(map(torch.equal, alone, watched))
    assert not dispatch_modes()


def test_compiled_programs_are_left_alone(tmp_path: Path) -> None:
    def loop() -> nn.Module:
        model = nn.Linear(8, 8)
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            compiled(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        return model

    alone = bits(loop)
    torch.compiler.reset()
    with observed(tmp_path) as observer:
        watched = bits(loop)
    torch.compiler.reset()
    assert all(map(torch.equal, alone, watched))
    assert "torch.compile" in observer.record.told


def test_a_profiler_of_the_scripts_own_is_left_alone(tmp_path: Path) -> None:
    def loop() -> nn.Module:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters())
        with torch.profiler.profile(profile_memory=True):
            for x in batches(5):
                model(x).mean().backward()
                optimizer.step()
        return model

    alone = bits(loop)
    with observed(tmp_path) as observer:
        watched = bits(loop)
    assert all(map(torch.equal, alone, watched))
    assert observer.record.notes == ["what kernels take for a while is not counted here"]


def test_fit_meets_no_hook_of_the_observer(tmp_path: Path) -> None:
    with observed(tmp_path) as observer:
        observer.plans()  # as the script's import of fit has it
        model = stowplan.fit(nn.Linear(4, 4), (torch.zeros(2, 4),), budget="1MiB", outputs="all")
        model(torch.zeros(2, 4)).sum().backward()
    assert "stowplan itself" in observer.record.told
