"""Options of a training that lasts: how often nodes fail, what checkpoints and restarts take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from planner.errors import PlannerError
from planner.units import DAY_S, HOUR_S

if TYPE_CHECKING:
    from costmodel.failures import Failures


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """How nodes fail, as a user says it; nothing is told of it where no node fails."""

    node_mtbf: Annotated[
        float | None,
        typer.Option(
            help="Also tell goodput and checkpoint interval: mean days between a node's failures."
        ),
    ] = None
    checkpoint_seconds: Annotated[
        float | None, typer.Option(help="With --node-mtbf: by how long a checkpoint stalls.")
    ] = None
    restart_seconds: Annotated[
        float | None,
        typer.Option(help="With --node-mtbf: from a failure to where the last checkpoint was."),
    ] = None
    slow_nodes: Annotated[
        str | None,
        typer.Option(
            help="With --node-mtbf: nodes that are slow for a while, as DAYS,HOURS,FACTOR: "
            "between a node's slow spells, of a spell, of a step."
        ),
    ] = None

    def failures(self) -> Failures | None:
        """Return them in seconds. Raises PlannerError where options lack each other."""
        from costmodel.failures import Failures

        rest = {
            "--checkpoint-seconds": self.checkpoint_seconds,
            "--restart-seconds": self.restart_seconds,
        }
        if self.node_mtbf is None:
            given = [name for name, value in rest.items() if value is not None]
            given += ["--slow-nodes"] * (self.slow_nodes is not None)
            if given:
                raise PlannerError(f"{given[0]} was given; say how often nodes fail by --node-mtbf")
            return None
        lacking = [name for name, value in rest.items() if value is None]
        if self.checkpoint_seconds is None or self.restart_seconds is None:
            raise PlannerError(f"--node-mtbf was given; give {' and '.join(lacking)} with it")
        days, hours, factor = self._slow()
        return Failures(
            node_mtbf_s=self.node_mtbf * DAY_S,
            checkpoint_s=self.checkpoint_seconds,
            restart_s=self.restart_seconds,
            slow_mtbf_s=days * DAY_S,
            slow_s=hours * HOUR_S,
            slow_factor=factor,
        )

    def _slow(self) -> tuple[float, float, float]:
        if self.slow_nodes is None:
            return float("inf"), 0.0, 1.0
        try:
            days, hours, factor = map(float, self.slow_nodes.split(","))
        except ValueError:
            raise PlannerError(
                f"--slow-nodes {self.slow_nodes!r} was given; give DAYS,HOURS,FACTOR such as "
                "365,3,1.4"
            ) from None
        return days, hours, factor
