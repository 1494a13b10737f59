"""The verb `fuzz`: draw models and training steps until the time is over, judge each.

The candidate is the engine, so this and what it is made of drive it; imports hypothesis.
"""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spmd_verify.errors import UsageError
from spmd_verify.exit_codes import FAILED, INTERRUPTED, NOTHING_JUDGED, PASSED
from spmd_verify.options import FuzzOptions

if TYPE_CHECKING:
    from spmd_verify.drawn.check import Differs, Rules, Tally
    from spmd_verify.drawn.series import Series

# Series of one seed: more than any run judges.
SEEDS: Final = 1_000_000
# Models of one series. Each begins with the simplest one, which is judged again every time.
ROUND: Final = 100
HEARTBEAT_SECONDS: Final = 30.0
# Longest time one failing model is shrunk. Measured: 150 runs of shrinking models take 40 s.
SHRINKING_SECONDS: Final = 60.0

Say = Callable[[str], None]


@dataclass
class Fuzz:
    """One run of the verb.

    Attributes:
        options: Checked options.
        result: Called with each line of the result.
        note: Called with each line of progress.
    """

    options: FuzzOptions
    result: Say
    note: Say
    files: list[Path] = field(default_factory=list)
    known: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _started: float = field(default_factory=time.monotonic)
    _heard: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Draw and judge until the seconds are over; return the exit code.

        Raises:
            UsageError: `hypothesis-missing`.
        """
        if importlib.util.find_spec("hypothesis") is None:
            raise UsageError(
                "fuzz draws its models with hypothesis, which is not installed. Install it: "
                "pip install 'spmd-verify[fuzz]'",
                slug="hypothesis-missing",
            )
        from hypothesis.configuration import set_hypothesis_home_dir

        from spmd_verify.drawn.check import Rules, Tally
        from spmd_verify.drawn.style import MODES, STYLES

        tally, is_interrupted = Tally(), False
        with tempfile.TemporaryDirectory() as home:
            set_hypothesis_home_dir(home)  # it would write to the current folder
            try:
                self._draw(
                    tally, Rules((*STYLES, *MODES), self.options.dtype, allows_refusals=True)
                )
            except KeyboardInterrupt:
                is_interrupted = True
            finally:
                set_hypothesis_home_dir(None)
        self._summarise(tally)
        if is_interrupted:
            return INTERRUPTED
        if self.files:
            return FAILED
        return PASSED if tally.models else NOTHING_JUDGED

    def _draw(self, tally: Tally, rules: Rules) -> None:
        """Judge series after series; write what each of them finds."""
        import torch
        from hypothesis.errors import Flaky, Unsatisfiable

        from spmd_verify.drawn.check import Differs
        from spmd_verify.drawn.series import Series

        torch.set_num_threads(1)  # the tensors are tiny
        self._started = self._heard = time.monotonic()  # imports are not counted
        for number in itertools.count(self.options.seed * SEEDS):
            if self._is_over(tally):
                return
            series = Series(
                number,
                ROUND,
                rules,
                self.options.max_ranks,
                tally,
                shrinking_seconds=SHRINKING_SECONDS,
                is_over=lambda: self._is_over(tally),
                is_known=self._is_known,
            )
            try:
                series.run()
            except (Differs, Flaky):
                self._write(series, rules)
            except Unsatisfiable:
                self.note(f"fuzz: all draws of series {number} were rejected")
            except KeyboardInterrupt:
                if series.failed:
                    self._write(series, rules)
                raise

    def _is_over(self, tally: Tally) -> bool:
        """Say whether the seconds are over; tell now and then how far it is."""
        now = time.monotonic()
        if now - self._heard >= HEARTBEAT_SECONDS:
            self._heard = now
            self.note(f"fuzz: {tally.models} models, {now - self._started:.0f} s")
        return now - self._started >= self.options.seconds

    def _is_known(self, difference: Differs) -> bool:
        """Say whether a difference is like one that was written; count it."""
        likeness = difference.finding.likeness
        if likeness not in self.known:
            return False
        self.known[likeness] += 1
        return True

    def _write(self, series: Series, rules: Rules) -> None:
        """Write the shortest model of a failing series, and say what it shows."""
        from spmd_verify.drawn.file import write_failing

        (drawn, _), difference = series.shortest()
        finding = difference.finding
        self.note(f"fuzz: found: {finding.what}; writing the model")
        options = self.options
        path, command = write_failing(
            options.output, options.seed, drawn, finding, rules, options.max_ranks
        )
        for known in (series.first.finding, finding):
            self.known[known.likeness] += 0
        self.files.append(path)
        self.result(
            f"{path}: {finding.style} on {finding.placing.text(finding.style)}: {finding.what}"
        )
        self.result(f"    {command}")

    def _summarise(self, tally: Tally) -> None:
        """Print what was done."""
        seconds = time.monotonic() - self._started
        options = self.options
        self.result(
            f"{tally.models} models, {tally.cells} cells in {seconds:.0f} s "
            f"({60 * tally.models / max(seconds, 1e-9):.0f} models a minute); seed {options.seed}, "
            f"{options.dtype}, meshes of 1 to {options.max_ranks} ranks"
        )
        reasons = Counter(dict.fromkeys(("rounding decides", "eager refuses"), 0))
        for text, count in tally.rejected.items():
            reasons[text.partition(":")[0]] += count
        self.result(f"refused: {_counted(tally.refused)}")
        self.result(f"rejected: {_counted(reasons)}")
        more = sum(self.known.values())
        alike = f", {more} more models fail alike" if more else ""
        self.result(f"failing: {len(self.files)}{alike}")


def _counted(counts: Counter[str]) -> str:
    """Return the sum of counts with what they count, the largest first."""
    named = ", ".join(f"{text} {count}" for text, count in counts.most_common() if count)
    return f"{counts.total()} ({named})" if named else "0"
