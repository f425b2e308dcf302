"""What a proof by blocks found: parts that were proven, the first fault of each, what was not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the proof.

    Attributes:
        name: what is shown, in words.
        counted: how much of what it was shown on, such as "3 block classes on 8 ranks".
        faults: what is wrong, each a sentence that names the thing; none where it is proven.
        times_rounding: the largest difference over the rounding measured, where values were
            compared.
        seconds: it took.
    """

    name: str
    counted: str
    faults: tuple[str, ...] = ()
    times_rounding: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A plan's proof by blocks.

    Attributes:
        world_size: ranks of the plan.
        parts: in the order they were looked at.
        cuts: what was cut down to run here, as sentences.
        unproven: what this does not show, as sentences.
    """

    world_size: int
    parts: tuple[Part, ...]
    cuts: tuple[str, ...]
    unproven: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether no part has a fault."""
        return not any(part.faults for part in self.parts)
