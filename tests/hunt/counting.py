"""Counting: what a run of many cases came to, as lines for a file and as a table for people."""

import json
from collections import Counter
from dataclasses import dataclass, field
from re import sub

from .cases import Case
from .lockstep import Result, Verdict


@dataclass(slots=True)
class Tally:
    """Verdicts, kinds of plan and distinct failures of all cases so far."""

    verdicts: Counter[str] = field(default_factory=Counter)
    traits: Counter[str] = field(default_factory=Counter)
    failures: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)  # seeds by likeness
    refusals: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0

    def add(self, case: Case, result: Result) -> bool:
        """Count a case; whether it is the first failure of its kind."""
        self.verdicts[result.verdict] += 1
        self.cpu_seconds += result.cpu_seconds
        if result.verdict is not Verdict.VOID:
            seen = {
                "recomputed": result.recomputes,
                "tiles": result.tiles,
                "transfers": result.transfers,
                "loop programs": result.turns > 0,
                "actions": result.turns,
            }
            self.traits.update({name: int(count) for name, count in seen.items()})
        if result.verdict is Verdict.REFUSED:
            message = sub(r"\S*hunted_\w+\.py:\d+|[\d.]+", "_", result.message)
            self.refusals[f"{result.stage.partition(' (')[0]}: {message[:90]}"] += 1
        if not result.is_finding:
            return False
        seeds = self.failures.setdefault(result.likeness, [])
        seeds.append(case.seed)
        return len(seeds) == 1

    @property
    def cases(self) -> int:
        """How many were decided; what eager cannot run is none."""
        return self.verdicts.total() - self.verdicts[Verdict.VOID]

    def table(self) -> str:
        """Counts, then each kind of failure with the seeds that show it."""
        lines = [f"{self.cases} cases, {self.cpu_seconds:.0f} s of the processor"]
        lines += [f"  {name:<14}{self.verdicts[name]:>7}" for name in Verdict]
        lines += [f"  {name:<14}{count:>7}" for name, count in self.traits.items()]
        if self.failures:
            lines.append("failures, by kind:")
        for (verdict, where, what), seeds in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            shown = ", ".join(map(str, seeds[:4]))
            lines.append(f"  {len(seeds):>5} {verdict} at {where}: {what} (seeds {shown})")
        if self.refusals:
            lines.append("refusals, by message:")
        lines += [f"  {count:>5} {text}" for text, count in self.refusals.most_common(25)]
        return "\n".join(lines)


def as_line(case: Case, result: Result) -> str:
    """One case for a file of lines."""
    told = {
        "seed": case.seed,
        "verdict": result.verdict,
        "stage": result.stage,
        "message": result.message[:500],
        "techniques": case.techniques,
        "budget": result.budget,
        "tiles": result.tiles,
        "transfers": result.transfers,
        "turns": result.turns,
        "cpu_seconds": round(result.cpu_seconds, 3),
    }
    return json.dumps(told)
