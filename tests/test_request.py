"""A request: every combination that is not offered is a row of one table, and each row refuses."""

import inspect
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import stowplan
from stowplan import Execution, Iteration, Mesh, PlanOptions, Search, Shapes, api
from stowplan.cli import plan
from stowplan.cli.main import main
from stowplan.errors import BadUse
from stowplan.plan.plan import Plan
from stowplan.request import FORMER, GROUPS, NOT_TOGETHER, NotOffered, Request, grouped
from stowplan.run.backend.compile import backend

pytestmark = pytest.mark.torch

SAMPLE = Path(__file__).parent / "formats" / "samples" / "chainer.txt"
_MOST_PARAMETERS = 14


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))])


_FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "budget by device": lambda: {"budget": {"cpu": "1GiB"}},
    "automatic budget": lambda: {"budget": "auto"},
    "reserve": lambda: {"reserve": "1MiB"},
    "loss": lambda: {"loss": torch.sum},
    "one output": lambda: {"loss": 0},
    "all outputs": lambda: {"outputs": "all"},
    "mesh": lambda: {"mesh": Mesh("data=2")},
    "shapes": lambda: {"shapes": Shapes({"x": {0: (1, 2)}})},
    "plan": lambda: {"plan": object.__new__(Plan)},
    "optimizer": lambda: {"iteration": Iteration(_optimizer())},
}
_OPTIONS: dict[str, Callable[[], PlanOptions]] = {
    "arena": lambda: PlanOptions(execution=Execution(arena=True)),
    "held blocks": lambda: PlanOptions(execution=Execution(held_blocks=True)),
    "compiled": lambda: PlanOptions(execution=Execution(kernels="compiled")),
    "time limit": lambda: PlanOptions(search=Search(time_limit=1.0)),
    "offload": lambda: PlanOptions(("offload",)),
    "offload-gradients": lambda: PlanOptions(("offload-gradients",)),
    "tile": lambda: PlanOptions(("tile",)),
}


def _joined(all_of: list[PlanOptions]) -> PlanOptions:
    """The options of all of them at once."""
    asked: dict[str, Any] = {}
    for options in all_of:
        usual = PlanOptions()
        asked |= {
            each.name: getattr(options, each.name)
            for each in fields(PlanOptions)
            if getattr(options, each.name) != getattr(usual, each.name)
        }
    if all(options.execution != Execution() for options in all_of) and len(all_of) > 1:
        changed = [
            {each.name: getattr(options.execution, each.name) for each in fields(Execution)}
            for options in all_of
        ]
        asked["execution"] = Execution(
            kernels="compiled" if any(each["kernels"] == "compiled" for each in changed) else "eager",
            arena=any(each["arena"] for each in changed),
            held_blocks=any(each["held_blocks"] for each in changed),
        )
    return PlanOptions(**asked)


def _of_fit(row: NotOffered) -> None:
    options = [_OPTIONS[fact]() for fact in sorted(row.facts) if fact in _OPTIONS]
    given: dict[str, Any] = {"budget": "1GiB", "options": _joined(options)}
    for fact in sorted(row.facts - _OPTIONS.keys()):
        given |= _FIELDS[fact]()
    Request(**given)


def _of_file(row: NotOffered) -> None:
    """The same at the door for files and functions by name."""
    target = str(SAMPLE) if "file" in row.facts else "train_here:step"
    asked: dict[str, Any] = {}
    words: dict[str, dict[str, Any]] = {
        "arena": {"execution": Execution(arena=True)},
        "compiled": {"execution": Execution(kernels="compiled")},
        "optimizer": {"optimizer": "adamw"},
        "saved": {"saved": "retain"},
        "training": {"training": True},
        "layouts": {"layouts": "chosen"},
    }
    for fact in sorted(row.facts - {"file", "function"}):
        asked |= words[fact]
    api.plan_for(target, 2**30, **asked)


def _of_graph(row: NotOffered) -> None:
    (technique,) = row.facts - {"graph"}
    torch.compile(nn.Linear(2, 2), backend=backend, options={"budget": "1GiB", "allow": technique})(
        torch.ones(1, 2)
    )


def _of_plan_command(row: NotOffered) -> None:
    words = {
        "arena": ["--arena"],
        "allocator": ["--allocator", "cuda"],
        "frontier": ["--frontier"],
        "card": ["--device", "a100-80gb"],
        "compiled": ["--kernels", "compiled"],
    }
    given = [word for fact in sorted(row.facts) for word in words[fact]]
    assert main(["plan", "train_here:step", "--budget", "1GiB", *given]) == BadUse.exit_code


@pytest.mark.parametrize("row", NOT_TOGETHER, ids=lambda row: " + ".join(sorted(row.facts)))
def test_each_row_of_the_table_refuses(
    row: NotOffered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if row.facts & {"allocator", "frontier", "card"}:
        _of_plan_command(row)
        assert row.sentence in " ".join(capsys.readouterr().err.split())
        return
    (tmp_path / "train_here.py").write_text("def step(): raise AssertionError('refused before it is loaded')")
    monkeypatch.chdir(tmp_path)
    ask = _of_graph if "graph" in row.facts else _of_file if row.facts & {"file", "function"} else _of_fit
    with pytest.raises(BadUse) as refusal:
        ask(row)
    assert str(refusal.value) == row.sentence


def test_no_two_rows_are_of_the_same_facts() -> None:
    assert len({row.facts for row in NOT_TOGETHER}) == len(NOT_TOGETHER)


def test_fit_has_few_parameters_and_says_what_each_is() -> None:
    parameters = inspect.signature(stowplan.fit).parameters
    assert len(parameters) <= _MOST_PARAMETERS
    told = inspect.getdoc(stowplan.fit) or ""
    _, _, arguments = told.partition("Args:")
    assert [name for name in parameters if f"\n    {name}: " not in arguments] == []


@pytest.mark.parametrize("group", GROUPS.values(), ids=lambda group: group.__name__)
def test_each_option_of_a_group_is_explained_where_it_is_declared(group: type) -> None:
    _, _, arguments = (inspect.getdoc(group) or "").partition("Args:")
    names = [each.name for each in fields(group)]
    assert [name for name in names if f"\n    {name}: " not in arguments] == []


def test_former_spellings_still_work_and_name_the_new_one() -> None:
    model, args = nn.Linear(4, 4), (torch.ones(2, 4),)
    former: Any = {"moves": 3, "gap": 0.5, "arena": True, "keep_plans": 2}
    with pytest.warns(DeprecationWarning, match="of fit") as told:
        fitted = stowplan.fit(model, args, budget="1MiB", loss=torch.sum, **former)
    planner = fitted.__dict__["_fitting"].planner
    assert planner.options.search == Search(moves=3, gap=0.5)
    assert planner.options.execution == Execution(arena=True)
    assert [str(each.message) for each in told] == [
        "moves= and gap= of fit are now in search=stowplan.Search(moves=..., gap=...)",
        "arena= of fit is now in execution=stowplan.Execution(arena=...)",
        "keep_plans= of fit is now in shapes=stowplan.Shapes(shapes, keep_plans=...)",
    ]
    assert {Path(each.filename).parts[-2] for each in told} == {"support"}  # which wraps fit in tests


def test_former_spellings_and_new_ones_are_one_request() -> None:
    optimizer = _optimizer()
    given = {
        "optimizer": optimizer,
        "clip_norm": 1.0,
        "accumulate": 2,
        "mesh": "data=2",
        "parameters": "shard",
    }
    assert grouped(given) == {
        "optimizer": Iteration(optimizer, clip_norm=1.0, accumulate=2),
        "mesh": Mesh("data=2", parameters="shard"),
    }
    assert grouped({"search": Search(gap=0.5), "moves": 3}) == {"search": Search(gap=0.5, moves=3)}
    with pytest.raises(BadUse, match="clip_norm= is of an iteration; give optimizer= too"):
        grouped({"clip_norm": 1.0})
    with pytest.raises(BadUse, match="dims= and layouts= are of a step on a mesh"):
        grouped({"dims": {}, "layouts": "choose"})


def test_the_new_spelling_warns_of_nothing() -> None:
    model, args = nn.Linear(4, 4), (torch.ones(2, 4),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stowplan.fit(model, args, budget="1MiB", loss=torch.sum, search=Search(moves=3))


def test_an_option_is_declared_once() -> None:
    names = [each.name for group in GROUPS.values() for each in fields(group)]
    assert len(names) == len(set(names))
    parameters = set(inspect.signature(stowplan.fit).parameters)
    assert not parameters & (set(FORMER) - set(GROUPS))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: Search(gap=-1), "gap is -1"),
        (lambda: Search(moves=-1), "moves is -1"),
        (lambda: Search(time_limit=0), "time_limit is 0"),
        (lambda: Iteration(_optimizer(), accumulate=0), "accumulate is 0"),
        (lambda: Iteration(_optimizer(), clip_norm=0.0), "clip_norm is 0.0"),
        (lambda: Iteration(_optimizer(), clip_value=-1.0), "clip_value is -1.0"),
        (lambda: Iteration(_optimizer(), clip_norm=1.0, clip_value=1.0), "both given"),
        (lambda: Iteration(_optimizer(), keep_gradients="head"), "keep_gradients is 'head'"),
        (lambda: Mesh(2, parameters="shard"), "not for a chosen division"),
        (lambda: Mesh(2, dims={}), "of a number of workers, that is chosen"),
        (lambda: Shapes(keep_plans=0), "keep_plans is 0"),
    ],
)
def test_a_group_refuses_what_its_options_cannot_be(wrong: Callable[[], object], why: str) -> None:
    with pytest.raises(BadUse, match=why):
        wrong()


def test_the_commands_options_are_those_of_the_groups() -> None:
    parser = ArgumentParser()
    plan.add_arguments(parser)
    asked = parser.parse_args(["train:step", "--budget", "1GiB"])
    for group, names in ((Search, ("prefer", "gap", "time_limit")), (Execution, ("kernels", "arena"))):
        usual = {each.name: each.default for each in fields(group)}
        assert {name: getattr(asked, name) for name in names} == {name: usual[name] for name in names}
    (kernels,) = (action for action in parser._actions if action.dest == "kernels")
    assert tuple(kernels.choices or ()) == get_args(Execution.__annotations__["kernels"])
