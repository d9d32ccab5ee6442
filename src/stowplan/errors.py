"""One tree of errors. Each message says what is wrong, where, how large, and what to try."""

import re
from collections.abc import Callable, Iterable
from typing import Self

_MOST_LISTED = 5  # parts of a step that a refusal lists


class StowplanError(Exception):
    """Base of all errors. `exit_code` is the exit code of the command line for it."""

    exit_code = 2


class BadUse(StowplanError):
    """The call is wrong: an option, a unit, or a combination of options."""


def nearest(word: object, known: Iterable[str]) -> str:
    """A question after an unknown word, if it looks like a known one; else nothing."""
    from difflib import get_close_matches  # only for a refusal

    near = get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


class NotTileable(StowplanError):
    """A part of a step cannot be computed in tiles; `reason` says why. Other parts may still be tiled.

    Code that makes candidates raises it, and code that collects them catches it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"not tiled: {reason}")


class TooManyWorkers(BadUse):
    """A mesh has more workers along a dim than the tensor has elements there, so it is not projected."""


class BadInput(StowplanError):
    """A file is damaged or breaks its format. Names the file and the line, key or byte."""

    def __init__(self, what: str, *, file: str = "", where: str = "") -> None:
        self.what, self.file, self.where = what, file, where
        super().__init__(": ".join(part for part in (file, where, what) if part))

    def in_file(self, file: str) -> "BadInput":
        """The same fault with the name of its file."""
        return type(self)(self.what, file=file, where=self.where)


class InvalidGraph(StowplanError):
    """A graph breaks a rule of `ir.spec`. The message shows the ops around the fault."""


class MissingRule(StowplanError):
    """A table of `ops/` has neither an entry for an op nor a default."""


class MalformedOp(MissingRule):
    """An op lacks an operand, a dim or an attribute that the rule of its type reads."""


class CaptureError(StowplanError):
    """A training step cannot be captured: the cause, the line of the user's code, and what to try."""

    def __init__(self, what: str, *, where: str = "", advice: str = "") -> None:
        self.what, self.where, self.advice = what, where, advice
        super().__init__(f"{where + ': ' if where else ''}{what}{'; ' + advice if advice else ''}")


class TorchTooOld(StowplanError):
    """The installed PyTorch is older than the oldest that stowplan runs on."""


class TensorChanged(StowplanError, RuntimeError):
    """A tensor that backward needs was changed in place after forward, as autograd reports it too."""

    exit_code = 1


class NotFinite(StowplanError, FloatingPointError):
    """Numbers are infinite or NaN where the step asks, and the plan is for finite ones."""

    exit_code = 1


class IllegalPlan(StowplanError):
    """A plan does not compute its graph: it reads a missing value or leaves out an op."""

    exit_code = 1


class PlanOfAnotherStep(IllegalPlan):
    """A saved plan is for another step than the one that it was given for."""


class BudgetTooSmall(StowplanError):
    """No plan fits the budget. `minimum_bytes` is the smallest budget, `binding` the tensors that set it.

    If tiles were considered, `untiled` has one line for each part of the step that they did not help. A
    budget below the bytes of parameters, inputs and gradients is refused without a search. Then
    `binding` is empty, and `minimum_bytes` searches when it is first read, for as long as `time_limit` or, if
    there is none, for ten seconds and a hundred steps. If `ended` says what ended a search, a smaller budget
    may do.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        allowed_bytes: int,
        minimum_bytes: "int | Callable[[], BudgetTooSmall]",
        binding: tuple[str, ...],
        untiled: tuple[str, ...] = (),
    ) -> None:
        self.allowed_bytes, self._minimum_bytes, self.binding = allowed_bytes, minimum_bytes, binding
        self._ended = ""
        self.what, self.untiled = what, untiled
        super().__init__(self._text())

    @property
    def minimum_bytes(self) -> int:
        """The smallest budget for which a plan was found."""
        if not isinstance(self._minimum_bytes, int):
            found = self._minimum_bytes()
            self._minimum_bytes, self._ended = found.minimum_bytes, found.ended
        return self._minimum_bytes

    @property
    def ended(self) -> str:
        """What ended the search for the smallest budget early; empty if nothing did."""
        return self._ended if self.minimum_bytes else ""

    def ended_by(self, what: str) -> Self:
        """The same refusal of a search that something has ended."""
        return self._changed(_ended=what)

    def again(self) -> Self:
        """The same refusal, to be raised a second time."""
        return self._changed()

    @property
    def known_minimum_bytes(self) -> int | None:
        """The smallest budget; None if nobody has searched for it yet."""
        return self._minimum_bytes if isinstance(self._minimum_bytes, int) else None

    def with_untiled(self, untiled: tuple[str, ...]) -> Self:
        """The same refusal, with the reasons why tiles did not help."""
        return self._changed(untiled=untiled)

    def above(self, nbytes: int, why: str) -> Self:
        """The same refusal with a larger smallest budget, and why the smallest plan does not count."""
        return self._changed(what=f"{self.what}; {why}", _minimum_bytes=nbytes)

    def beside(self, nbytes: int, what: str) -> Self:
        """The refusal of a budget that also has to hold `nbytes` for something else."""
        if not nbytes:
            return self
        known = self.known_minimum_bytes
        total = "" if known is None else f", {known + nbytes:,} bytes in total"
        return self._changed(
            what=f"{self.what}; with {nbytes:,} bytes for {what}{total}",
            allowed_bytes=self.allowed_bytes + nbytes,
            _minimum_bytes=(lambda: self._more(nbytes)) if known is None else known + nbytes,
        )

    def _more(self, nbytes: int) -> Self:
        return self._changed(_minimum_bytes=self.minimum_bytes + nbytes, _ended=self.ended)

    def _changed(self, **attributes: object) -> Self:
        """The same refusal with other attributes, and the text that follows from them."""
        made = type(self).__new__(type(self))
        vars(made).update({**vars(self), **attributes})
        made.__notes__ = [*getattr(self, "__notes__", ())]
        made.args = (made._text(),)
        return made

    def _text(self) -> str:
        return self.what + _tiles_tried(self.untiled)


class PlanTooSlow(BudgetTooSmall):
    """The fastest plan found within the budget takes `time_ratio` times eager's time: nobody asked for that.

    `minimum_bytes` is the smallest known budget with a plan that takes at most `slowest` times eager's time.
    `technique` is what takes the time, and `asking` the option that uses the slow plan.
    """

    def __init__(
        self,
        technique: str,
        *,
        allowed_bytes: int,
        minimum_bytes: int,
        time_ratio: float,
        slowest: float,
        asking: str,
    ) -> None:
        self.technique, self.time_ratio, self.slowest, self.asking = technique, time_ratio, slowest, asking
        super().__init__("", allowed_bytes=allowed_bytes, minimum_bytes=minimum_bytes, binding=())

    def at_best(self, minimum_bytes: int) -> Self:
        """The same refusal where a smaller budget has a fast plan for other reasons."""
        return self._changed(_minimum_bytes=minimum_bytes)

    def beside(self, nbytes: int, what: str) -> Self:
        """The refusal of a budget that also has to hold `nbytes` for something else."""
        return self._changed(
            what=f"{self.what}, with {nbytes:,} bytes for {what}" if nbytes else self.what,
            allowed_bytes=self.allowed_bytes + nbytes,
            _minimum_bytes=self.minimum_bytes + nbytes,
        )

    def _text(self) -> str:
        option, _, value = self.asking.partition("=")
        written = f"search=stowplan.Search({self.asking})" if option == "prefer" else self.asking
        words = ",".join(re.findall(r"\w+", value))
        return (
            f"{self.allowed_bytes:,} bytes allowed{self.what}, and the fastest plan found for that, by"
            f" {self.technique}, takes {self.time_ratio:.1f} times eager's time; {self.minimum_bytes:,} bytes"
            f" is the smallest known budget with a plan that takes at most {self.slowest:g} times. To use the"
            f" slow plan, give fit {written}, or a command --{option} {words}"
        )


def _tiles_tried(untiled: tuple[str, ...]) -> str:
    """A few lines on why tiles did not help."""
    if not untiled:
        return ""
    rest = len(untiled) - _MOST_LISTED
    lines = (*untiled[:_MOST_LISTED], *((f"and {rest} more",) if rest > 0 else ()))
    return "\nTiles were tried:" + "".join(f"\n  {line}" for line in lines)


class OutOfDeviceMemory(StowplanError):
    """The model of the caching allocator has no room for a request, after it released all that was free."""

    exit_code = 1

    def __init__(
        self, requested_bytes: int, *, limit_bytes: int, allocated_bytes: int, reserved_bytes: int
    ) -> None:
        self.requested_bytes, self.limit_bytes = requested_bytes, limit_bytes
        self.allocated_bytes, self.reserved_bytes = allocated_bytes, reserved_bytes
        super().__init__(
            f"no room for {requested_bytes:,} bytes on a device of {limit_bytes:,}: {reserved_bytes:,} are"
            f" reserved, of which {allocated_bytes:,} are allocated; if much is reserved but not allocated,"
            " try expandable_segments:True"
        )


class TierFailed(StowplanError):
    """A tensor could not be offloaded or loaded back. Only gradients that were final have left the step."""

    exit_code = 1


class TierFull(TierFailed):
    """The tier has no room for the tensors that a plan offloads."""


class TierDamaged(TierFailed):
    """A tier returned other bytes than were stored in it."""


class WorkerLost(StowplanError):
    """A worker of a mesh died, hangs or cannot be reached: one of `suspects`. `rank` noticed it."""

    exit_code = 1

    def __init__(self, what: str, *, rank: int, step: int, suspects: tuple[int, ...]) -> None:
        self.rank, self.step, self.suspects = rank, step, suspects
        super().__init__(what)
