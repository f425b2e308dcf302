"""One measurement in progress: its conditions, and its records kept in step with the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np

from planner.errors import ProfileError
from planner.runtime.process.groups.alike import differences
from planner.units import GIB
from profiles.lookup.families import pace_kind
from profiles.lookup.op_model import record_key
from profiles.lookup.topology import nodes_of
from profiles.measure.probes import BlockProbe, CollectiveProbe, OpProbe
from profiles.measure.visits import at_pace, midmean, over_ranks, undisturbed_pace
from profiles.records import CollectiveRecord, OpQuery, OpRecord, PaceKind, SkippedProbe
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

THREADS = 1
"""Host threads of a rank while measuring and, by default, while training."""


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

    def differences(self) -> list[str]:
        """Return a line for each thing in which nodes differ, with its values and their nodes."""
        return differences(
            (
                self.hosts[ranks[0]],
                (
                    ("the driver", str(self.about[ranks[0]]["driver"])),
                    ("torch", str(self.about[ranks[0]]["torch"])),
                    ("memory", f"{self.about[ranks[0]]['memory_bytes'] / GIB:.0f} GiB"),
                    ("the number of ranks", str(len(ranks))),
                ),
            )
            for ranks in self.nodes
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
    """Where the files are."""
    ranks: Ranks
    """The ranks that measure."""
    conditions: dict[str, str | int]
    """What must be equal for two measurements to be one."""
    ops: dict[tuple, OpRecord]
    """By device, `record_key` and arguments."""
    collectives: dict[tuple, CollectiveRecord]
    """By kind, bytes and shape of group."""
    skipped: list[SkippedProbe] = field(default_factory=list)
    """Probes that gave no number."""
    clocks: list[Mapping[str, Any]] = field(default_factory=list)
    """Clocks of a GPU behind each visit of each rank (`driver.ClockState`), where known."""
    paces: dict[tuple[str, PaceKind], list[float]] = field(default_factory=dict)
    """Seconds of the fixed works beside all visits so far, by kind of device and of work."""

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
                f"{conditions.get(key)!r}; give another `out`, or delete {directory}"
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
        for record in ops:
            pace = record.device, pace_kind(record.target)
            session.paces.setdefault(pace, []).extend(record.paces)
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
        self, probe: OpProbe | BlockProbe, answers: Sequence[Mapping[str, Sequence[float]]]
    ) -> None:
        """Add a visit of an op; each rank answers with samples by name: see `OpTimer.visit`."""
        self.clocks += [
            {"rank": rank, **state}
            for rank, answer in enumerate(answers)
            if (state := cast(Mapping[str, Any] | None, answer.get("clock"))) is not None
        ]
        for kind, ranks in self.ranks.kinds.items():
            mine = [answers[rank] for rank in ranks]
            for query in probe.queries:
                if all(answer[query.direction] for answer in mine):
                    record = self._op_record(probe, query, kind, mine)
                    self.ops[_op_key(record)] = record
        write_ops(self.directory, self.ops.values())

    def _op_record(
        self,
        probe: OpProbe | BlockProbe,
        query: OpQuery,
        kind: str,
        answers: Sequence[Mapping[str, Sequence[float]]],
    ) -> OpRecord:
        known = self.ops.get((kind, record_key(query), probe.arguments))
        fixed = pace_kind(query.target)
        visit, pace = over_ranks(
            [float(np.median(answer[query.direction])) for answer in answers],
            [float(np.median(answer[fixed])) for answer in answers if answer[fixed]],
        )
        visits = (*(known.visits if known else ()), _rounded(visit))
        # Paces are kept beside their visits, as the undisturbed pace is known at the end
        # (`settle`).
        new = [] if pace is None else [_rounded(pace)]
        self.paces.setdefault((kind, fixed), []).extend(new)
        paces = (*(known.paces if known else ()), *new)
        samples = [s for answer in answers for s in answer[query.direction]]
        warm = [s for answer in answers for s in answer.get(f"{query.direction}_warm", ())]
        return OpRecord(
            target=query.target,
            shapes=query.shapes,
            dtype=query.dtype,
            direction=query.direction,
            arguments=probe.arguments,
            flop=query.flop,
            num_bytes=query.num_bytes,
            warm_seconds=_least(warm, known.warm_seconds if known else None),
            visits=visits,
            paces=paces,
            repeats=len(samples) + (known.repeats if known else 0),
            **self._times((kind, fixed), visits, paces, samples),
            **self._provenance(kind),
        )

    def settle(self) -> None:
        """Scale all ops to the undisturbed pace, now that the whole measurement shows it."""
        for key, record in self.ops.items():
            if len(record.visits) > 1:
                pace = record.device, pace_kind(record.target)
                times = self._times(pace, record.visits, record.paces, ())
                self.ops[key] = record.model_copy(update=times)
        write_ops(self.directory, self.ops.values())

    def _times(
        self,
        pace: tuple[str, PaceKind],
        visits: Sequence[float],
        paces: Sequence[float],
        samples: Sequence[float],
    ) -> dict[str, Any]:
        undisturbed = undisturbed_pace(self.paces.get(pace, ()))
        steady = at_pace(visits, paces, undisturbed)
        return {"seconds": midmean(steady), "spread": _spread(steady, samples)}

    def add_collective(
        self, probe: CollectiveProbe, samples: Sequence[float], *, concurrent_groups: int
    ) -> None:
        """Add a visit of a collective."""
        known = self.collectives.get(_probe_key(probe))
        # The mean, not the median: now and then a call waits for a thread, and a step pays for
        # that.
        visits = (*(known.visits if known else ()), _rounded(np.mean(samples)))
        self.collectives[_probe_key(probe)] = CollectiveRecord(
            kind=probe.kind,
            num_bytes=probe.num_bytes,
            ranks_per_node=probe.group.ranks_per_node,
            num_nodes=probe.group.num_nodes,
            concurrent_groups=concurrent_groups,
            seconds=midmean(visits),
            spread=_spread(visits, samples),
            visits=visits,
            repeats=len(samples) + (known.repeats if known else 0),
            **self._provenance(str(self.conditions["device"])),
        )
        write_collectives(self.directory, self.collectives.values())

    def skip(self, probe: object, reason: object) -> None:
        """Note a probe that gave no number."""
        self.skipped.append(SkippedProbe(probe=str(probe), reason=str(reason)))

    def _provenance(self, device: str) -> dict[str, Any]:
        return {
            "device": device,
            "driver": self.conditions["driver"],
            "torch": self.conditions["torch"],
            "threads": THREADS,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _rounded(seconds: float | np.floating[Any]) -> float:
    return float(f"{seconds:.5g}")


def _spread(visits: Sequence[float], samples: Sequence[float]) -> float:
    """Return interquartile range over median, of the visits if there are several."""
    low, middle, high = np.percentile(visits if len(visits) > 1 else samples, [25, 50, 75])
    return float((high - low) / middle)


def _least(samples: Sequence[float], known: float | None) -> float | None:
    """Return the time with inputs in cache: of the visit that was disturbed least."""
    found = [float(np.median(samples))] if samples else []
    return min([*found, *([known] if known else [])], default=None)


def _op_key(record: OpRecord) -> tuple:
    return record.device, record_key(record), record.arguments


def _collective_key(record: CollectiveRecord) -> tuple:
    return record.kind, record.num_bytes, record.ranks_per_node, record.num_nodes


def _probe_key(probe: CollectiveProbe) -> tuple:
    return probe.kind, probe.num_bytes, probe.group.ranks_per_node, probe.group.num_nodes
