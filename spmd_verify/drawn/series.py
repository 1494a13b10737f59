"""A series of drawn models, judged one after the other; a failing one is shrunk by hypothesis."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hypothesis import HealthCheck, Phase, Verbosity, assume, given, seed, settings

from spmd_verify.drawn.check import Differs, Rules, Tally, Undrawable, check_drawn
from spmd_verify.drawn.model import DrawnModel
from spmd_verify.drawn.strategies import drawn_models, placings
from spmd_verify.drawn.style import Placing

Drawn = tuple[DrawnModel, Placing]
# Runs a failing series may spend on shrinking; hypothesis itself would take five minutes.
SHRINKING_RUNS: Final = 150


def rules_for_one(rules: Rules, style: str) -> Rules:
    """Return the rules with one style only: shrinking keeps to the style that failed first."""
    return Rules((style,), rules.dtype, rules.passes, rules.allows_refusals)


@dataclass
class Series:
    """A fixed series of draws, repeatable by its number.

    Attributes:
        number: Seeds the draws.
        examples: Models to judge.
        rules: How they are judged.
        max_ranks: The largest mesh.
        tally: Counts what was done.
        shrinking_runs: Models a failing series may run to shrink.
        shrinking_seconds: Likewise, seconds.
        is_over: Asked before each model; once it says yes, the rest is passed over.
        is_known: Whether a difference is one that was found before: it is counted by the
            caller, and the series goes on.
        failed: Every failing model met, the first one first.
    """

    number: int
    examples: int
    rules: Rules = field(default_factory=Rules)
    max_ranks: int = 8
    tally: Tally = field(default_factory=Tally)
    shrinking_runs: int = SHRINKING_RUNS
    shrinking_seconds: float = float("inf")
    is_over: Callable[[], bool] = lambda: False
    is_known: Callable[[Differs], bool] = lambda _difference: False
    failed: dict[Drawn, Differs] = field(default_factory=dict)
    _spent: int = 0
    _shrinking_since: float = 0.0

    def run(self) -> None:
        """Judge the series.

        Raises:
            Differs: The shortest failing model found, with its source.
            hypothesis.errors.Unsatisfiable: Every draw was rejected.
        """
        options = settings(
            max_examples=self.examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
        )
        seed(self.number)(options(given(drawn_models(), placings(self.max_ranks))(self._judge)))()

    def _judge(self, drawn: DrawnModel, placing: Placing) -> None:
        """Judge one draw; the property that hypothesis tries to falsify."""
        rules = self.rules
        if self.failed:
            if (drawn, placing) in self.failed:
                raise self.failed[drawn, placing]
            assume(not self._is_exhausted())
            self._spent += 1
            rules = rules_for_one(rules, self.first.style)
        elif self.is_over():
            return
        # Shrinking judges what was drawn once already: it is not counted.
        tally = Tally() if self.failed else self.tally
        try:
            check_drawn(drawn, placing, tally, rules)
        except Undrawable as refusal:
            tally.rejected[str(refusal)] += 1
            assume(False)
        except Differs as difference:
            if self._is_another(difference) if self.failed else self.is_known(difference):
                return
            if not self.failed:
                self._shrinking_since = time.monotonic()
                self.tally.models += 1
            self.failed[drawn, placing] = difference
            raise

    def shortest(self) -> tuple[Drawn, Differs]:
        """Return the shortest failing model met, and what it shows."""
        return min(self.failed.items(), key=lambda item: len(item[0][0].to_source()))

    @property
    def first(self) -> Differs:
        """What the first failing model showed."""
        return next(iter(self.failed.values()))

    def _is_another(self, difference: Differs) -> bool:
        """Say whether a model met while shrinking fails otherwise than the first one."""
        first, now = self.first.finding, difference.finding
        return (first.kind == "crash", first.place) != (now.kind == "crash", now.place)

    def _is_exhausted(self) -> bool:
        """Say whether shrinking has used up its runs or its seconds."""
        seconds = time.monotonic() - self._shrinking_since
        return self._spent >= self.shrinking_runs or seconds >= self.shrinking_seconds
