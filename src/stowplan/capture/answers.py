"""Answers: what forward read of values. Asked again at each call, or taken for granted and checked.

Small integer and boolean arguments keep their values while a step is captured. Where forward reads one, as in
`if mask.all():` or `torch.zeros(lengths.max())`, the captured program holds only for the same answer. The few
ops that lead from the arguments to each answer are kept, so that a call can ask before it runs the program.

`if not torch.isfinite(h).all(): raise ...` reads a value that does not exist before the step runs. Where one
of the two answers does nothing but raise, the step is captured with the other. What was asked becomes one
more output of the step, and each call looks at it: the error that eager would raise is raised when forward
ends. A step that asks whether all numbers are finite, and goes another way if not, is captured for finite
numbers; other numbers raise NotFinite.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from stowplan.capture.changes import Beside
from stowplan.capture.composite import buffer_named
from stowplan.capture.layouts import run_on_zeros
from stowplan.capture.program import Call, copies_of_written, draws, filled, inputs_of, outputs_by_name
from stowplan.capture.stand_ins import StorageView
from stowplan.torch_private import OpOverload, pytree


@dataclass(frozen=True, slots=True)
class Check:
    """The answer that a step was captured with, and the error that the other answer raises."""

    expected: bool
    error: Exception

    @staticmethod
    def of(error: Exception, *, expected: bool) -> "Check":
        """Without the frames that the error passed through, which hold tensors."""
        bare = copy(error).with_traceback(None)
        bare.__context__ = bare.__cause__ = None
        return Check(expected, bare)


@dataclass(frozen=True, slots=True)
class Checked:
    """What a model returns, with what its checks asked."""

    returned: object
    asked: tuple[Tensor, ...]
    checks: tuple[Check, ...]

    def passed(self) -> object:
        """What the model returns; the error of the first check that fails."""
        for tensor, check in zip(self.asked, self.checks, strict=True):
            if bool(tensor) is not check.expected:
                raise copy(check.error)
        return self.returned


def unchecked(returned: object) -> object:
    """What the model itself returns."""
    returned = returned.returned if isinstance(returned, Beside) else returned
    return returned.returned if isinstance(returned, Checked) else returned


def checked(returned: object, asked: Sequence[tuple[Tensor, Check]]) -> object:
    """What a step returns, with its checks if it has any."""
    if not asked:
        return returned
    return Checked(returned, tuple(tensor for tensor, _ in asked), tuple(check for _, check in asked))


pytree.register_pytree_node(
    Checked,
    lambda found: ([found.returned, *found.asked], found.checks),
    lambda children, checks: Checked(next(iter(children)), tuple(children)[1:], checks),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A question about tensors and the answer that forward was given; `where` is the user's line.

    `counts` names the buffer that the answer is a number of, if the step changes this buffer: a pointer or a
    counter, which is likely to be another number at the next call.
    """

    ask: Callable[..., object]
    tensors: tuple[str, ...]
    value: object
    where: str
    counts: str = ""


@dataclass(frozen=True, slots=True)
class Draw:
    """A random call before a question about what was drawn, with views in place of its operands.

    It runs on zeros, which takes as much from the generator; `number` is the output that the question needs.
    """

    target: OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    number: str | None


@dataclass(frozen=True, slots=True)
class Answers:
    """Calls and answers in the order of forward. `inputs` are the names of the arguments, by position.

    `constants` are tensors of the user's code that a call needs; the guards hold them to their values.
    `buffers` are those that a call needs, with the name that each has in the model.
    """

    steps: tuple[Call | Draw | Answer, ...] = ()
    inputs: tuple[str | None, ...] = ()
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)

    def other_answer(
        self, arguments: Sequence[object], model: nn.Module, *, counting: bool = True
    ) -> str | None:
        """What forward would find otherwise with these arguments; None if the program holds for them.

        Unless `counting`, numbers of counters are not asked for.
        """
        if not self.steps:
            return None
        values: dict[str, Tensor] = dict(self.constants)
        values.update((name, buffer_named(model, known)) for name, known in self.buffers.items())
        named = zip(self.inputs, arguments, strict=True)
        values.update((name, leaf) for name, leaf in named if name is not None and isinstance(leaf, Tensor))
        if not self.draws:
            return self._other_answer(values, counting)
        with torch.random.fork_rng(()):
            return self._other_answer(values, counting)

    @property
    def counters(self) -> tuple[Answer, ...]:
        """The answers that are numbers of buffers which the step changes."""
        return tuple(step for step in self.steps if isinstance(step, Answer) and step.counts)

    @property
    def draws(self) -> bool:
        """Whether forward asks what it has drawn."""
        return any(isinstance(step, Draw) for step in self.steps)

    def _other_answer(self, values: dict[str, Tensor], counting: bool) -> str | None:
        with torch.no_grad():
            for step in self.steps:
                if isinstance(step, Call):
                    values.update(_made(step, values))
                    continue
                if isinstance(step, Draw):
                    drawn = run_on_zeros(step.target, step.args, step.kwargs)
                    if step.number is not None and isinstance(drawn, Tensor):
                        values[step.number] = drawn
                    continue
                if step.counts and not counting:
                    continue
                now = step.ask(*(values[name] for name in step.tensors))
                if now != step.value:
                    return f"forward reads {_short(now)} instead of {_short(step.value)} at {step.where}"
        return None


NO_ANSWERS = Answers()


def answers_among(
    calls: Sequence[Call],
    answers: Sequence[tuple[int, Answer]],
    inputs: tuple[str | None, ...],
    constants: Mapping[str, Tensor],
    buffers: Mapping[str, str],
    view_of: Callable[[str], StorageView],
    changed: Iterable[str] = (),
) -> Answers:
    """The answers that depend on arguments, buffers or draws; each is given with the calls before it.

    `changed` are the tensors that the step changes.
    """
    changing = {name for name in (*inputs, *buffers) if name is not None}
    random = {place for place, call in enumerate(calls) if draws(call.target, call.args, call.kwargs)}
    for place, call in enumerate(calls):
        if place in random or not changing.isdisjoint(inputs_of(call)):
            changing.update(name for name in call.outputs if name is not None)
    asked: dict[object, tuple[int, Answer]] = {}
    for place, answer in answers:
        if not changing.isdisjoint(answer.tensors):
            asked.setdefault((answer.ask, answer.tensors), (place, answer))
    if not asked:
        return NO_ANSWERS
    steps: list[tuple[int, int, Call | Draw | Answer]] = [
        (place, 0, answer) for place, answer in asked.values()
    ]
    needed = {name for _, answer in asked.values() for name in answer.tensors}
    last_number = -1
    for place in range(len(calls) - 1, -1, -1):
        if place in random:
            if not needed.isdisjoint(calls[place].outputs):
                last_number = max(last_number, place)
        elif not needed.isdisjoint(calls[place].outputs):
            needed.update(inputs_of(calls[place]))
            steps.append((place, 1, calls[place]))
    for place in random:
        if place <= last_number:
            call = calls[place]
            number = next((name for name in call.outputs if name in needed), None)
            operands = {name: view_of(name) for name in inputs_of(call)}
            args = tuple(filled(value, operands) for value in call.args)
            kwargs = {name: filled(value, operands) for name, value in call.kwargs.items()}
            steps.append((place, 1, Draw(call.target, args, kwargs, number)))
    steps.sort(key=lambda step: step[:2])
    counters = {name: path for name, path in buffers.items() if name in changed}
    for index, (place, kind, step) in enumerate(steps):
        if isinstance(step, Call):
            origins = [counters[name] for name in inputs_of(step) if name in counters]
            counters.update((made, origins[0]) for made in step.outputs if made is not None and origins)
        elif isinstance(step, Answer) and not isinstance(step.value, (bool, tuple)):
            origin = next((counters[name] for name in step.tensors if name in counters), "")
            steps[index] = place, kind, replace(step, counts=origin)
    known = {name: tensor for name, tensor in constants.items() if name in needed}
    asked_of = {name: path for name, path in buffers.items() if name in needed}
    return Answers(tuple(step for _, _, step in steps), inputs, known, asked_of)


def _made(call: Call, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a call by name."""
    args = [filled(value, values) for value in call.args]
    kwargs = {name: filled(value, values) for name, value in call.kwargs.items()}
    written = copies_of_written(call, args, kwargs)
    return outputs_by_name(call, call.target(*args, **kwargs), written)


def shape_of(tensor: Tensor) -> object:
    """For ops whose result is as long as values say."""
    return tuple(tensor.shape)


def contents_of(tensor: Tensor) -> object:
    """For code that takes all values at once."""
    return tensor.tolist()


def count_of(mask: Tensor) -> object:
    """How many elements a mask selects."""
    return int(torch.count_nonzero(mask))


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """An op that answers with a number, with the arguments that are not tensors."""

    target: OpOverload
    rest: tuple[object, ...]
    named: Mapping[str, object]

    def __call__(self, *tensors: Tensor) -> object:
        return self.target(*tensors, *self.rest, **self.named)


@dataclass(frozen=True, slots=True)
class IsBelow:
    """Whether all elements are classes from 0 to `limit`, as `one_hot` asks."""

    limit: int

    def __call__(self, tensor: Tensor) -> object:
        return not tensor.numel() or bool((tensor >= 0).all() & (tensor < self.limit).all())


def _short(answer: object) -> str:
    text = str(answer)
    return text if len(text) <= 60 else f"{text[:57]}..."
