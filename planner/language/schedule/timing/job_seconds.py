"""What the jobs of each stage take, and the transfers into it: `JobSeconds`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, mul

from planner.errors import ScheduleError
from planner.language.schedule.jobs import JobKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeconds:
    """Seconds of the jobs of each stage, and of the transfers into it; entries are by stage.

    A full backward takes `backward_input_s + backward_weight_s`.
    """

    forward_s: tuple[float, ...]
    """A forward."""
    backward_input_s: tuple[float, ...]
    """A backward up to its input's gradient."""
    backward_weight_s: tuple[float, ...]
    """The weight gradients that an input-gradient job leaves."""
    receive_forward_s: tuple[float, ...]
    """Transfer of a stage's input from the stage before; ignored within a rank."""
    receive_backward_s: tuple[float, ...]
    """Transfer of a stage's gradient from the stage after; ignored within a rank."""
    last_backward_input_s: tuple[float, ...] | None = None
    """`backward_input_s` of the microbatch whose forward on the stage is the step's last, where
    it differs: it may not be recomputed."""
    sends_ahead_s: tuple[float, ...] | None = None
    """Early send: a full backward's gradient for another rank is ready so long before the job's
    end."""
    last_sends_ahead_s: tuple[float, ...] | None = None
    """The same of the stage's last backward of the step."""

    def __post_init__(self) -> None:
        """Raise ScheduleError when jobs of different kinds have different numbers of stages."""
        parts = (self.forward_s, self.backward_input_s, self.backward_weight_s)
        if len({len(part) for part in parts}) != 1:
            raise ScheduleError(
                "stage times need one entry for each stage in all three lists; "
                f"{len(parts[0])} F, {len(parts[1])} I and {len(parts[2])} W times given"
            )

    @classmethod
    def of_stages(
        cls,
        *,
        forward_s: Sequence[float],
        backward_input_s: Sequence[float],
        backward_weight_s: Sequence[float],
        transfer_s: float | Sequence[float] = 0.0,
    ) -> JobSeconds:
        """Return the times of stages between which a transfer takes as long either way.

        `transfer_s` is one number for all boundaries, or one for each: the i-th between stages i
        and i+1. Raises ScheduleError when lengths differ or a time is negative.
        """
        num_stages = len(forward_s)
        if isinstance(transfer_s, float | int):
            transfer_s = (transfer_s,) * (num_stages - 1)
        if len(transfer_s) != num_stages - 1:
            raise ScheduleError(
                f"transfer_s has {len(transfer_s)} entries; {num_stages} stages have "
                f"{num_stages - 1} boundaries"
            )
        given = (*forward_s, *backward_input_s, *backward_weight_s, *transfer_s)
        if min(given, default=0.0) < 0:
            raise ScheduleError("stage times must not be negative; give 0 or more")
        return cls(
            forward_s=tuple(forward_s),
            backward_input_s=tuple(backward_input_s),
            backward_weight_s=tuple(backward_weight_s),
            receive_forward_s=(0.0, *transfer_s),
            receive_backward_s=(*transfer_s, 0.0),
        )

    @classmethod
    def equal(
        cls,
        num_stages: int,
        *,
        forward_s: float = 1.0,
        backward_input_s: float = 1.0,
        backward_weight_s: float = 1.0,
        transfer_s: float | Sequence[float] = 0.0,
    ) -> JobSeconds:
        """Return the same times for every stage; by default one second for F, I and W."""
        return cls.of_stages(
            forward_s=(forward_s,) * num_stages,
            backward_input_s=(backward_input_s,) * num_stages,
            backward_weight_s=(backward_weight_s,) * num_stages,
            transfer_s=transfer_s,
        )

    def by_kind(self) -> dict[JobKind, tuple[float, ...]]:
        """Return the seconds of each stage for each job kind, in the order of `JobKind`."""
        return {
            JobKind.FORWARD: self.forward_s,
            JobKind.FULL_BACKWARD: tuple(map(add, self.backward_input_s, self.backward_weight_s)),
            JobKind.BACKWARD_INPUT: self.backward_input_s,
            JobKind.BACKWARD_WEIGHT: self.backward_weight_s,
        }

    def last_by_kind(self) -> dict[JobKind, tuple[float, ...]]:
        """Return the same of a stage's last microbatch, of the kinds that may differ."""
        inputs_s = self.last_backward_input_s or self.backward_input_s
        return {
            JobKind.FULL_BACKWARD: tuple(map(add, inputs_s, self.backward_weight_s)),
            JobKind.BACKWARD_INPUT: inputs_s,
        }

    def between_ranks(
        self, stage_to_pp_rank: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the transfers into each stage from the one before and from the one after; 0 where
        there is none or where both are on one rank.
        """
        crossed = [a != b for a, b in pairwise(stage_to_pp_rank)]
        return (
            tuple(map(mul, self.receive_forward_s, (False, *crossed))),
            tuple(map(mul, self.receive_backward_s, (*crossed, False))),
        )
