"""What a node says of itself before ranks start: its software, its files, what it refuses."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlannerError
from planner.files import PACKAGE
from planner.language.plan import Plan
from planner.nodes.meeting import in_order
from planner.runtime.process.groups.alike import differences, release

MISSING = "not there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one launcher tells the others.

    Attributes:
        node: its host's name.
        name: its host's full name, by which torchelastic orders nodes.
        pid: of the launcher, which orders those of one host.
        number: in the order of ranks, where it was told; None: by name and pid.
        ranks_here: ranks that it starts.
        versions: (what, version) of the software.
        files: (what, SHA-256 of the file's bytes, or `MISSING`).
        refusal: why the plan can't run here, in one line; empty where it can.
    """

    node: str
    name: str
    pid: int
    number: int | None
    ranks_here: int
    versions: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    refusal: str = ""


def in_order_of_ranks(nodes: Iterable[Facts]) -> tuple[list[Facts], str]:
    """Return the nodes as `launch` sorts them, and why their numbers give no order, if so."""
    by_name = sorted(nodes, key=lambda each: (each.name, each.pid))
    try:
        order = in_order([each.number for each in by_name], [each.node for each in by_name])
    except PlannerError as error:
        return by_name, str(error)
    return [by_name[at] for at in order], ""


def facts_of_this_node(
    *,
    plan: Plan | None,
    plan_path: Path,
    script: Path,
    device: str,
    ranks_here: int,
    number: int | None = None,
    refusal: str = "",
) -> Facts:
    """Return this node's facts. `device` is a type of device; a `plan` that is no plan is None."""
    files = [("the plan", plan_path), ("the script", script)]
    if plan is not None and plan.model.file:
        files.append(("the model file", Path(plan.model.file)))
    return Facts(
        node=socket.gethostname(),
        name=socket.getfqdn(),
        pid=os.getpid(),
        number=number,
        ranks_here=ranks_here,
        versions=tuple(_versions(device)),
        files=tuple((f"{what} {path}", _digest(path)) for what, path in files),
        refusal=refusal,
    )


def facts_that_differ(nodes: Sequence[Facts]) -> list[str]:
    """Return a line for each version or file that nodes differ in, with its values."""
    return differences((each.node, (*each.versions, *each.files)) for each in nodes)


def same_plan(nodes: Sequence[Facts]) -> bool:
    """Whether all have the same plan, without which no ranks can meet."""
    return len({facts.files[0][1] for facts in nodes}) == 1


def _versions(device: str) -> Iterable[tuple[str, str]]:
    import torch

    yield "planner", _own_version()
    yield "Python", platform.python_version()
    yield "torch", torch.__version__
    if device == "cpu":
        return
    if device == "cuda" and torch.version.cuda:
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
        yield "the driver", _driver()
    yield "the device", torch.get_device_module(device).get_device_name(0)


def _own_version() -> str:
    """The release, and a digest of the source: two checkouts may call themselves the same."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return f"{release()}, source {digest.hexdigest()[:8]}"


def _driver() -> str:
    """The first line of what the NVIDIA kernel module says of itself on Linux."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in line.split() if word[0].isdigit() and "." in word), line)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return MISSING
