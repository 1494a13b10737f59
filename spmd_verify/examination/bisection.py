"""Find the first boundary of a failing step behind which everything is right, once it is fed.

Torch-free: what feeding does is asked of a function, so the search is tested without ranks.
Design: docs/design.md 3.11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spmd_verify.examination.flow import KNOWN, Flow
from spmd_verify.record import Row


class Stopped(Exception):
    """The search ends without a place: why."""


@dataclass(frozen=True)
class Outcome:
    """One run with the reference fed in.

    Attributes:
        wrong: Losses and parameters whose gradient is wrong.
        off: Boundaries that deviate by more than noise, before anything was fed in there.
    """

    wrong: frozenset[str]
    off: frozenset[str]


@dataclass
class Search:
    """One failing step while its fault is looked for.

    Attributes:
        flow: Its boundaries.
        rows: The losses and gradients that are wrong, by name.
        run: Runs the step with the reference fed in at some boundaries, by key.
        may_run: Says whether there is time for another run.
    """

    flow: Flow
    rows: Mapping[str, Row]
    run: Callable[[list[str]], Outcome]
    may_run: Callable[[], bool]
    _outcomes: dict[int, Outcome] = field(default_factory=dict)

    def place(self) -> int | None:
        """Return the place of the fault: the first that repairs everything computed from it.

        None where feeding in everything repairs nothing.

        Raises:
            Stopped: There is nothing to feed, or it repairs some and not the rest.
        """
        own: set[str] = set()
        places = self._places(own)
        if not places:
            raise Stopped("no boundary of a module can be held against the reference")
        left = self._left(places[-1], own)
        if not self._is_repaired(places[-1], left):
            return None
        while left:
            if not self.may_run():
                raise Stopped("there was no time to find a place")
            own |= left
            places = self._places(own)
            if not places:
                raise Stopped("nothing that is fed in repairs the step")
            left = self._left(places[-1], own)
        return self._extended(self._bisected(places, own), own)

    def last(self) -> tuple[int, Outcome]:
        """Return the last place that could be fed, and what was wrong then."""
        place = self._places(set())[-1]
        return place, self.outcome(place)

    def others(self, place: int) -> list[int]:
        """Return the places in front of one that deviate though all they get is right."""
        off = self.outcome(place).off
        return [
            i for i in range(place) if self.flow.is_solid(i) and self.flow.boundaries[i].key in off
        ]

    def outcome(self, place: int) -> Outcome:
        """Return what is wrong with the reference fed in up to a place.

        What may be a summand is fed as the whole only where it is the last.
        """
        if place not in self._outcomes:
            known = [b.key for b in self.flow.boundaries[:place] if b.finding in KNOWN]
            self._outcomes[place] = self.run([*known, self.flow.boundaries[place].key])
        return self._outcomes[place]

    def _is_repaired(self, place: int, left: set[str]) -> bool:
        """Say whether feeding in everything repairs anything."""
        if self.flow.is_forward:
            return not left
        outcome = self.outcome(place)
        return any(r.stage == "gradients" and n not in outcome.wrong for n, r in self.rows.items())

    def _places(self, own: set[str]) -> list[int]:
        """Return the boundaries where something can be fed in that can make a difference."""
        return [
            i
            for i, boundary in enumerate(self.flow.boundaries)
            if boundary.finding != "unknown" and self._due(i, own)
        ]

    def _bisected(self, places: list[int], own: set[str]) -> int:
        """Return the first boundary that removes the fault when all up to it are fed.

        First among those whose layout is known, as is that of all before them. Feeding what is
        right already changes nothing, so that search starts at the first that is wrong. Then
        the others in front of what was found, outer modules first: a summand is right inside a
        module that sums later, and feeding it as the whole sum repairs nothing.
        """
        solid = [i for i in places if self.flow.is_solid(i)]
        first = next((i for i in solid if self.flow.boundaries[i].finding == "wrong"), places[-1])
        low = max((i for i in solid if i < first), default=-1)
        low, high = self._between(low, places[-1], solid, own, first)
        depths = {i: self.flow.boundaries[i].module.count(".") for i in places if i not in solid}
        for depth in sorted(set(depths.values())):
            level = [i for i, own_depth in depths.items() if own_depth == depth]
            low, high = self._between(low, high, level, own)
        return high

    def _between(
        self, low: int, high: int, places: list[int], own: set[str], first: int | None = None
    ) -> tuple[int, int]:
        """Bisect over some of the boundaries between one that leaves the fault and one that not.

        Args:
            low: Leaves it; -1 for none.
            high: Removes it.
            places: In order; those not between are left out.
            own: Parameters that no feeding repairs.
            first: Where to begin; in the middle if left out.
        """
        while between := [i for i in places if low < i < high]:
            if not self.may_run():
                break
            i = first if first in between else between[len(between) // 2]
            if self._left(i, own):
                low = i
            else:
                high = i
            # The one next to a good guess decides; from then on in the middle.
            first = max((j for j in between if j < i), default=None) if first == i else None
        return low, high

    def _extended(self, high: int, own: set[str]) -> int:
        """Return the outermost boundary at which the sum that is missing may have been due.

        A summand is right inside a module that sums later. Where one is fed as the whole sum
        and that repairs all, the sum is missing somewhere up to the last summand in a row.
        """
        if self.flow.boundaries[high].finding != "summand":
            return high
        chain = []
        for i in range(high + 1, len(self.flow.boundaries)):
            boundary = self.flow.boundaries[i]
            if boundary.finding != "summand":
                break
            # The value behind a module is the one that enters the next: the same boundary.
            if not boundary.is_repeated or boundary.is_input != self.flow.is_forward:
                chain.append(i)
        for i in chain[::-1][:2]:
            if self.may_run() and not self._left(high, own, i):
                return i
        return high

    def _due(self, place: int, own: set[str]) -> set[str]:
        """Return what is wrong and computed from a boundary."""
        if self.flow.is_forward:
            losses = {name for name, row in self.rows.items() if row.stage == "loss"}
            after = self.flow.boundaries[place + 1 :]
            return losses | {b.key for b in after if self.flow.is_wrong(b)}
        return {
            name
            for name, row in self.rows.items()
            if row.stage == "gradients" and name not in own and self.flow.is_upstream(row, place)
        }

    def _left(self, place: int, own: set[str], fed_at: int | None = None) -> set[str]:
        """Return what of that is still wrong when the reference is fed in there, or elsewhere."""
        outcome = self.outcome(place if fed_at is None else fed_at)
        left = self._due(place, own) & (outcome.wrong | outcome.off)
        losses = {name for name, row in self.rows.items() if row.stage == "loss"}
        if self.flow.is_forward and losses and not losses & outcome.wrong:
            # A rank's share of the loss is no part of the reference: the loss itself decides.
            left -= {b.key for b in self.flow.boundaries if b.finding == "doubtful"}
        return left
