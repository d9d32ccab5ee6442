"""Plan: a schedule that was verified. Nothing else than `verify` makes one, and nothing changes it."""

from dataclasses import dataclass, fields
from pathlib import Path

from stowplan.errors import BadUse
from stowplan.plan.draft import Draft, Schedule
from stowplan.units import format_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Schedule):
    """A schedule that was verified: its steps compute its graph, with these figures, within its budget.

    Made by `verify` alone, of a draft; `replace` on a plan raises.
    """

    def __post_init__(self) -> None:
        raise TypeError("a Plan is made by verify(draft), and never changed: change plan.draft(), and verify")

    def draft(self) -> Draft:
        """The same schedule, to be changed and verified again."""
        return Draft(**{each.name: getattr(self, each.name) for each in fields(self)})

    def _repr_html_(self) -> str:
        """The same figures as a small table, for notebooks."""
        rows = (
            ("budget", format_bytes(self.allowed_bytes)),
            ("projected peak", format_bytes(self.projected_peak_bytes)),
            ("peak without a plan", format_bytes(self.plain_peak_bytes)),
            ("time", f"{self.time_ratio:.3f} x eager"),
            ("gradients", str(self.exactness)),
            *((("device", f"{self.projected_for}, projected"),) if self.projected_for else ()),
        )
        return (
            f"<table>{''.join(f'<tr><th>{name}</th><td>{value}</td></tr>' for name, value in rows)}</table>"
        )

    def save(self, path: str | Path) -> None:
        """Write it to a file, from which `stowplan.load_plan` reads it."""
        from stowplan.plan.files.plan_form import write  # the judges, who make plans, know no file

        try:
            Path(path).write_text(write(self), encoding="utf-8")
        except OSError as fault:
            raise BadUse(f"{path} cannot be written: {fault.strerror or fault}") from fault
