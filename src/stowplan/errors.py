"""One error tree. Every message says what is wrong, where, how large, and what to try."""


class StowplanError(Exception):
    """Anything stowplan refuses. `exit_code` is what the command line returns for it."""

    exit_code = 2


class BadUse(StowplanError):
    """The call itself cannot be answered: an option, a unit, a combination."""


class TooManyWorkers(BadUse):
    """A mesh has so many workers along a dim that some have nothing of a tensor, and is not projected."""


class BadInput(StowplanError):
    """A file is not what it claims to be; names the file and the line or key."""

    def __init__(self, what: str, *, file: str = "", where: str = "") -> None:
        self.what, self.file, self.where = what, file, where
        super().__init__(": ".join(part for part in (file, where, what) if part))

    def in_file(self, file: str) -> "BadInput":
        """The same fault, told with the file it was found in."""
        return type(self)(self.what, file=file, where=self.where)


class InvalidGraph(StowplanError):
    """A graph breaks a rule of `ir.spec`; the message shows the neighbourhood of the fault."""


class MissingRule(StowplanError):
    """A table of `ops/` was asked about an op it has no entry for, and has no default."""


class CaptureError(StowplanError):
    """A training step cannot be captured: what happened, where in the user's code, and what to try."""

    def __init__(self, what: str, *, where: str = "", advice: str = "") -> None:
        self.what, self.where, self.advice = what, where, advice
        super().__init__(f"{where + ': ' if where else ''}{what}{'; ' + advice if advice else ''}")


class IllegalPlan(StowplanError):
    """A plan does not compute its graph: it reads what is not there, or leaves out what must run."""

    exit_code = 1


class BudgetTooSmall(StowplanError):
    """No plan was found within the budget; tells the smallest that was, and what binds there."""

    exit_code = 1

    def __init__(
        self, what: str, *, allowed_bytes: int, minimum_bytes: int, binding: tuple[str, ...]
    ) -> None:
        self.allowed_bytes, self.minimum_bytes, self.binding = allowed_bytes, minimum_bytes, binding
        super().__init__(what)

    def beside(self, nbytes: int, what: str) -> "BudgetTooSmall":
        """The refusal of a budget that has to leave so many bytes for something else."""
        if not nbytes:
            return self
        minimum = self.minimum_bytes + nbytes
        return BudgetTooSmall(
            f"{self}; with {nbytes:,} bytes beside it for {what}, {minimum:,} bytes in all",
            allowed_bytes=self.allowed_bytes + nbytes,
            minimum_bytes=minimum,
            binding=self.binding,
        )


class TierFailed(StowplanError):
    """A tensor could not be moved away or back; the step it was for has left no trace."""

    exit_code = 1


class TierFull(TierFailed):
    """The tier has no room for what a plan wants to move there."""


class TierDamaged(TierFailed):
    """What a tier gave back is not what it was given."""


class WorkerLost(StowplanError):
    """A worker of a mesh has died, hangs or cannot be reached: one of `suspects`. `rank` noticed it."""

    exit_code = 1

    def __init__(self, what: str, *, rank: int, step: int, suspects: tuple[int, ...]) -> None:
        self.rank, self.step, self.suspects = rank, step, suspects
        super().__init__(what)
