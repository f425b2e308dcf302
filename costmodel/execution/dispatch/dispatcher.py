"""The record of a dispatcher, what brings tokens to their experts and back; read from its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from planner.errors import PlannerError

DATA = Path(__file__).parent.parent / "data" / "dispatchers"

Sends = Literal["expert", "rank", "node", "all"]
"""What is sent of a token that k experts take: a row for each of them; a row to each rank that has
some of them; a row to each node that has some, whose links hand it on; or a row to every rank,
whatever experts it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatcher:
    """What an exchange of experts' rows takes on a dispatcher, there or back.

        seconds = call_s + peer_s * m + all-to-all of the bytes that are sent / part of its rate

    m: ranks of the exchange on other nodes. Compute hides none of `call_s`.
    """

    name: str
    """What it is called in rows, plans and reports."""
    sends: Sends
    """What goes over the links, of each token."""
    call_s: float
    """Seconds of an exchange before rows move: ranks tell each other how many come, the host waits
    for these numbers, sizes what it receives and starts it."""
    peer_s: float
    """Seconds that each rank of another node adds to an exchange, however few its rows."""
    link_part: float
    """Part that it reaches of the rate of an all-to-all inside a node."""
    network_part: float
    """Part that it reaches of the rate of an all-to-all between nodes."""
    wide_part: float
    """Part of that rate among more ranks of a node than eight, of which collectives were
    measured."""
    narrow_bytes: float
    """Bytes of an element on the way to the experts, their scales included; 0: as rows are."""
    sms_part: float
    """Part of a device's multiprocessors that it takes while it runs beside compute."""
    most_ranks: int
    """Ranks of the largest exchange; 0: any number."""
    devices: tuple[str, ...]
    """Words for devices that it runs on, some in a device's name; none: all."""
    waits_for_fullest: bool
    """All ranks wait for the one that receives most; else for what they receive themselves."""
    sorts_ahead: bool
    """A kernel puts copies of tokens in the order of experts ahead of an exchange; else they are
    copied where they arrive."""
    pads_rows: bool
    """Rows arrive filled up to a whole number of tiles for each expert; else a runtime that needs
    that copies them (`Execution.pads_rows`)."""
    buffer_rows: int
    """Rows of memory, outside the allocator, for each place that is sent to: each rank of the
    node, and each node where there are several."""
    behind_shared: bool
    """An exchange may run beside the experts that every token goes through."""
    behind_microbatch: bool
    """An exchange may run beside another microbatch's compute."""

    def runs(self, device: str, ranks: int) -> bool:
        """Whether it exchanges rows among so many ranks on a device of this name."""
        is_known = not self.devices or any(word in device for word in self.devices)
        return is_known and (not self.most_ranks or ranks <= self.most_ranks)


_FIELDS = tuple(field.name for field in fields(Dispatcher) if field.name != "name")


def dispatcher_names() -> tuple[str, ...]:
    """Return the names of all records."""
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


@lru_cache(maxsize=64)
def find_dispatcher(name: str) -> Dispatcher:
    """Return a dispatcher's record; raise PlannerError for an unknown name."""
    values = {key: entry["value"] for key, entry in dispatcher_entries(name).items()}
    return Dispatcher(name=name, **values | {"devices": tuple(values["devices"])})


def dispatcher_entries(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the constants of a record, each with its `value` and its `source`: its own over those
    of the record that it `extends`.
    """
    if name not in dispatcher_names():
        raise PlannerError(
            f"dispatcher {name!r} is unknown; valid names: {', '.join(dispatcher_names())}"
        )
    record = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    base = record.get("extends")
    entries = {**(dispatcher_entries(base) if base else {}), **record["values"]}
    missing = [field for field in _FIELDS if field not in entries]
    unknown = sorted(set(entries) - set(_FIELDS))
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise PlannerError(f"dispatcher record {name}.json {what}; restore it")
    return entries
