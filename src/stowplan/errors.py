"""One error tree. Every message says what is wrong, where, how large, and what to try."""


class StowplanError(Exception):
    """Anything stowplan refuses. `exit_code` is what the command line returns for it."""

    exit_code = 2


class BadUse(StowplanError):
    """The call itself cannot be answered: an option, a unit, a combination."""


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


class IllegalPlan(StowplanError):
    """A plan does not compute its graph: it reads what is not there, or leaves out what must run."""

    exit_code = 1
