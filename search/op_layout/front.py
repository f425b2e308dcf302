"""The front of seconds against bytes that layouts of a model's blocks offer.

With t(x) the seconds and b(x) the bytes of a choice x for all blocks, the point of a price is

    x(price) = argmin_x  t(x) + price b(x)

and the points of all prices are the corners of the front's lower hull (its "supported" points).
They are found by bisection (Aneja and Nair 1979, "Bicriteria transportation problem",
Management Science 25): between two corners the price is tried at which both cost the same; what
is cheaper there is a corner between them, and if nothing is, there is none. k corners take at
most 2k - 1 solutions. Plans that lie above the hull are not found: a mix of kinds of
recomputation, chosen stage by stage, does there what they could.

Prices best end where a percent of the bytes is worth a percent of the seconds: past that,
recomputing a whole block, which is about a third of the seconds for nearly all bytes that wait,
is the better trade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.language.plan import ClassLayout
from search.op_layout.block_problem import BlockProblem, Choice, read_layouts

# Corners found twice differ by rounding.
_SAME = 1e-9


def find_front(
    fast: LayoutPoint,
    solve: Callable[[float], LayoutPoint],
    last_price: float,
    *,
    least_saving: float,
) -> Sequence[LayoutPoint]:
    """Return the corners from the fastest to that of the last price, fastest first.

    `solve(price)` is the best point where a byte is worth `price` seconds. Corners are not looked
    for between points whose bytes differ by less than `least_saving` of the larger.
    """
    last = solve(last_price)
    return [fast, *_between(fast, last, solve, least_saving), last]


def _between(
    fast: LayoutPoint, lean: LayoutPoint, solve: Callable[[float], LayoutPoint], least_saving: float
) -> Sequence[LayoutPoint]:
    saving, extra = fast.num_bytes - lean.num_bytes, lean.seconds - fast.seconds
    # Too near each other in bytes to matter, or the lean end is no slower: no corner is in between.
    if saving <= least_saving * fast.num_bytes or extra <= 0:
        return []
    # At this price both ends cost the same: what is cheaper is a corner between them.
    price = extra / saving
    found = solve(price)
    costs = [choice.seconds + price * choice.num_bytes for choice in (found, fast)]
    if costs[0] >= (1 - _SAME) * costs[1]:
        return []
    return [
        *_between(fast, found, solve, least_saving),
        found,
        *_between(found, lean, solve, least_saving),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """One layout per class, by class index; seconds and bytes are of all blocks, as solved."""

    by_class: tuple[ClassLayout, ...]
    seconds: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutPoint:
    """Choices for all classes between the same block boundaries; `uses` are the blocks of each."""

    uses: Mapping[int, int]
    problems: tuple[BlockProblem, ...]
    choices: tuple[Choice, ...]

    @cached_property
    def seconds(self) -> float:
        """Seconds of all blocks."""
        return sum(
            count * problem.value(choice.values) for count, problem, choice in self._counted()
        )

    @cached_property
    def num_bytes(self) -> float:
        """Bytes of all blocks."""
        return sum(
            count * problem.num_bytes(choice.values) for count, problem, choice in self._counted()
        )

    @property
    def fair_price(self) -> float:
        """Seconds of a byte at which a percent of the bytes is worth a percent of the seconds."""
        return self.seconds / max(1.0, self.num_bytes)

    def layouts(self) -> Layouts:
        """Return the layouts that the choices mean."""
        by_class: dict[int, ClassLayout] = {}
        for _, problem, choice in self._counted():
            by_class.update(read_layouts(problem, choice.values))
        return Layouts(
            by_class=tuple(by_class[index] for index in sorted(by_class)),
            seconds=self.seconds,
            num_bytes=self.num_bytes,
        )

    def _counted(self) -> Iterator[tuple[int, BlockProblem, Choice]]:
        for problem, choice in zip(self.problems, self.choices, strict=True):
            # Of classes that are solved together each counts in parts of the most blocks of any.
            yield max(self.uses[index] for index, _ in problem.programs), problem, choice
