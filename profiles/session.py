"""One measurement in progress: its conditions, and its records kept in step with the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import ProfileError
from profiles.op_model import record_key
from profiles.probes import BlockProbe, CollectiveProbe, OpProbe
from profiles.records import CollectiveRecord, OpRecord, SkippedProbe
from profiles.store import (
    COLLECTIVES_FILE,
    OPS_FILE,
    read_collectives,
    read_ops,
    read_session,
    write_collectives,
    write_ops,
    write_session,
)
from profiles.topology import nodes_of

THREADS = 1
"""Host threads of a rank while measuring and, by default, while training."""

OP_PERCENTILE = 25.0
"""Of the visits to an op, in each of which the median counts. What disturbs an op only ever
slows it, so that the quieter visits repeat better (on a busy machine, 78% instead of 69% of
ops within 10%). Collectives are disturbed both ways and take the median of visits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What each rank said of itself: device, memory_bytes, driver, torch, node."""

    about: tuple[Mapping[str, Any], ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name of each rank."""
        return tuple(answer["node"] for answer in self.about)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node."""
        return nodes_of(self.hosts)

    @property
    def kinds(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each kind of device, the most frequent kind first."""
        counts = Counter(answer["device"] for answer in self.about)
        return {
            kind: tuple(r for r, answer in enumerate(self.about) if answer["device"] == kind)
            for kind, _ in counts.most_common()
        }

    @property
    def memory_bytes(self) -> float:
        """Least memory of a rank: ranks on CPU share their node's, each GPU has its own."""
        sizes = Counter(self.hosts)
        return min(
            answer["memory_bytes"] / (sizes[answer["node"]] if answer["shares_memory"] else 1)
            for answer in self.about
        )

    def conditions(self, device_type: str) -> dict[str, str | int]:
        """Return what must be equal for two measurements to be one."""
        first = self.about[0]
        return {
            "device": " + ".join(self.kinds),
            "device_type": device_type,
            "driver": first["driver"],
            "torch": first["torch"],
            "nproc": len(self.about),
            "nodes": len(self.nodes),
            "threads": THREADS,
        }


@dataclass
class Session:
    """Records so far. Mutable: it grows with every visit, and so do its files."""

    directory: Path
    ranks: Ranks
    conditions: dict[str, str | int]
    ops: dict[tuple, OpRecord]
    collectives: dict[tuple, CollectiveRecord]
    skipped: list[SkippedProbe] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path, ranks: Ranks, *, device_type: str) -> Session:
        """Begin in a new directory, or go on with the records of an earlier run.

        Raises ProfileError when those were made under other conditions or are damaged.
        """
        conditions = ranks.conditions(device_type)
        known = read_session(directory)
        if known is not None and known != conditions:
            key = next((k for k in conditions if known.get(k) != conditions[k]), "conditions")
            raise ProfileError(
                f"{directory} holds measurements with {key} {known.get(key)!r}, but here it is "
                f"{conditions.get(key)!r}; give another --out, or delete {directory}"
            )
        write_session(directory, conditions)
        ops = read_ops(directory) if (directory / OPS_FILE).exists() else ()
        collectives = read_collectives(directory) if (directory / COLLECTIVES_FILE).exists() else ()
        session = cls(
            directory=directory,
            ranks=ranks,
            conditions=conditions,
            ops={_op_key(record): record for record in ops},
            collectives={_collective_key(record): record for record in collectives},
        )
        write_ops(directory, ops)
        write_collectives(directory, collectives)
        return session

    def num_visits(self, probe: OpProbe | BlockProbe | CollectiveProbe) -> int:
        """Return how often every record of the probe was visited; 0 if one is missing."""
        return min(len(record.visits) if record else 0 for record in self._records_of(probe))

    def uncertainty(self, probe: OpProbe | BlockProbe | CollectiveProbe) -> float:
        """Return the largest relative standard error of the probe's records; 0 without any."""
        return max(r.standard_error if r else 0.0 for r in self._records_of(probe))

    def _records_of(
        self, probe: OpProbe | BlockProbe | CollectiveProbe
    ) -> list[OpRecord | CollectiveRecord | None]:
        if isinstance(probe, CollectiveProbe):
            return [self.collectives.get(_probe_key(probe))]
        return [
            self.ops.get((kind, record_key(query), probe.arguments))
            for kind in self.ranks.kinds
            for query in probe.queries
        ]

    def add_op(
        self, probe: OpProbe | BlockProbe, samples: Mapping[tuple[str, str], Sequence[float]]
    ) -> None:
        """Add a visit of an op; `samples` are by kind of device and name, which is a
        direction, or a direction followed by ``_warm``.
        """
        for kind in self.ranks.kinds:
            for query in probe.queries:
                found = samples.get((kind, query.direction))
                if not found:
                    continue
                known = self.ops.get((kind, record_key(query), probe.arguments))
                warm = samples.get((kind, f"{query.direction}_warm"))
                record = OpRecord(
                    target=query.target,
                    shapes=query.shapes,
                    dtype=query.dtype,
                    direction=query.direction,
                    arguments=probe.arguments,
                    flop=query.flop,
                    num_bytes=query.num_bytes,
                    warm_seconds=_least(warm, known.warm_seconds if known else None),
                    **self._provenance(found, kind, known, percentile=OP_PERCENTILE),
                )
                self.ops[_op_key(record)] = record
        write_ops(self.directory, self.ops.values())

    def add_collective(
        self, probe: CollectiveProbe, samples: Sequence[float], *, concurrent_groups: int
    ) -> None:
        """Add a visit of a collective."""
        known = self.collectives.get(_probe_key(probe))
        self.collectives[_probe_key(probe)] = CollectiveRecord(
            kind=probe.kind,
            num_bytes=probe.num_bytes,
            ranks_per_node=probe.group.ranks_per_node,
            num_nodes=probe.group.num_nodes,
            concurrent_groups=concurrent_groups,
            **self._provenance(samples, str(self.conditions["device"]), known, percentile=50.0),
        )
        write_collectives(self.directory, self.collectives.values())

    def skip(self, probe: object, reason: object) -> None:
        """Note a probe that gave no number."""
        self.skipped.append(SkippedProbe(probe=str(probe), reason=str(reason)))

    def _provenance(
        self,
        samples: Sequence[float],
        device: str,
        known: OpRecord | CollectiveRecord | None,
        *,
        percentile: float,
    ) -> dict[str, Any]:
        """Return what a record says of all its visits, the one that gave `samples` the latest."""
        visit = float(f"{np.median(samples):.5g}")
        visits = (*(known.visits if known else ()), visit)
        low, middle, high = np.percentile(visits if len(visits) > 1 else samples, [25, 50, 75])
        return {
            "device": device,
            "driver": self.conditions["driver"],
            "torch": self.conditions["torch"],
            "threads": THREADS,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "repeats": len(samples) + (known.repeats if known else 0),
            "spread": float((high - low) / middle),
            "seconds": float(np.percentile(visits, percentile)),
            "visits": visits,
        }


def _least(samples: Sequence[float] | None, known: float | None) -> float | None:
    """Return the time with inputs in cache: of the visit that was disturbed least."""
    found = [float(np.median(samples))] if samples else []
    return min([*found, *([known] if known else [])], default=None)


def _op_key(record: OpRecord) -> tuple:
    return record.device, record_key(record), record.arguments


def _collective_key(record: CollectiveRecord) -> tuple:
    return record.kind, record.num_bytes, record.ranks_per_node, record.num_nodes


def _probe_key(probe: CollectiveProbe) -> tuple:
    return probe.kind, probe.num_bytes, probe.group.ranks_per_node, probe.group.num_nodes
