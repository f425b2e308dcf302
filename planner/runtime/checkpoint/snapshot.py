"""All of a training run at one moment: a rank's parts, and what is small.

The *notes* are what is no part of a tensor: counts, random states, param groups, numbers that an
optimizer keeps, and the state of what the script gave beside (schedulers, scalers). Each rank has
its own; merged they are stored once.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import PlanError
from planner.runtime.checkpoint.folder import Manifest
from planner.runtime.checkpoint.optimizer_state import OptimizerNotes, take_apart
from planner.runtime.checkpoint.parts import (
    Part,
    average_parts,
    dtype_name,
    model_parts,
    optimized_parts,
)
from planner.runtime.stage.randomness import read_generators, write_generators
from planner.runtime.state.rank_state import RankState

_OF_ENGINE = " of the engine"
"""In names of what engines save beside by themselves."""


@dataclass(slots=True)
class Notes:
    """What is small of a run.

    Attributes:
        step: optimizer steps done.
        samples: samples trained on.
        optimizer: its param groups and numbers.
        seed: of the streams of random numbers, None where no op draws.
        streams: states of those streams, by the place of the ranks that draw from one.
        generators: states of the script's own generators, by rank.
        extra: state dicts of what the script gave, by its names.
    """

    step: int
    samples: int
    optimizer: OptimizerNotes
    seed: int | None = None
    streams: dict[int, list[Tensor]] = field(default_factory=dict)
    generators: dict[int, dict[str, Any]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def merge(self, other: Notes) -> None:
        """Take in those of another rank."""
        self.optimizer.merge(other.optimizer)
        for place, state in other.streams.items():
            self.streams.setdefault(place, state)
        self.generators |= other.generators


def take(state: RankState, extra: Mapping[str, Any]) -> tuple[list[Part], Notes]:
    """Return what this rank has of a run. Raises PlanError for an extra without a state dict."""
    rank = dist.get_rank()
    parts = model_parts(state)
    averages = average_parts(state, parts)
    optimizer = OptimizerNotes()
    if state.optimizer is not None:
        params, by_fqn = optimized_parts(state, parts)
        states, optimizer = take_apart(state.optimizer, params, by_fqn)
        parts += states
    parts += averages
    notes = Notes(state.steps, state.samples, optimizer)
    stream = state.random
    if stream is not None:
        notes.seed = stream.seed
        # Ranks with the same samples and stage share a stream; the first of them stores it.
        if stream.place == rank:
            notes.streams = {rank: stream.state()}
    notes.generators = {rank: _generators(state.mesh.device)}
    for name, kept in extra.items():
        _check_stateful(name, kept)
        if rank == 0:
            notes.extra[name] = copy.deepcopy(kept.state_dict())
    return parts, notes


def describe(state: RankState) -> Manifest:
    """Return what a checkpoint says of itself, but for its files."""
    plan, graph = state.plan, state.graph
    stored = {
        name: tensor.fqn
        for tensor in graph.tensors
        if tensor.kind in ("param", "buffer")
        for name in (tensor.fqn, *tensor.aliases)
    }
    return Manifest(
        step=state.steps,
        samples=state.samples,
        precision=plan.precision,
        ranks=f"pp={plan.pp} vpp={plan.vpp} {plan.degrees} zero_stage={plan.zero_stage}",
        model=plan.model.name,
        fingerprint=plan.model.fingerprint,
        state={
            name: (stored.get(name, name), dtype_name(dtype))
            for name, dtype in state.outside.dtypes.items()
        },
        versions=versions(),
    )


def restore(state: RankState, notes: Notes, extra: Mapping[str, Any]) -> None:
    """Put back counts, random states and extras."""
    state.steps, state.samples = notes.step, notes.samples
    if state.random is not None and notes.seed is not None:
        state.random.restore(notes.seed, notes.streams, notes.step)
    own = notes.generators.get(dist.get_rank())
    if own is None or len(notes.generators) != dist.get_world_size():
        # Of another number of ranks: all go on with those of rank 0, as they do where every rank
        # chooses the same batches.
        own = notes.generators.get(0)
    if own is not None:
        _set_generators(state.mesh.device, own)
    for name, kept in extra.items():
        kept.load_state_dict(notes.extra[name])


def check_extra(extra: Mapping[str, Any], notes: Notes) -> None:
    """Raise PlanError for an extra that is not stored, or can't be loaded."""
    for name, kept in extra.items():
        _check_stateful(name, kept)
        if name not in notes.extra:
            held = ", ".join(name for name in notes.extra if _OF_ENGINE not in name) or "none"
            raise PlanError(
                f"the checkpoint has no extra {name!r} (it has {held}); give load what save was "
                "given"
            )


def _check_stateful(name: str, kept: Any) -> None:
    if not hasattr(kept, "state_dict") or not hasattr(kept, "load_state_dict"):
        raise PlanError(
            f"extra {name!r} is a {type(kept).__name__}, without state_dict and load_state_dict; "
            "give a scheduler, a scaler, a sampler or another object that has both"
        )


def _generators(device: torch.device) -> dict[str, Any]:
    """States of the script's generators."""
    found: dict[str, Any] = {"torch": read_generators(device), "python": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    return found


def _set_generators(device: torch.device, states: Mapping[str, Any]) -> None:
    if len(states["torch"]) == len(read_generators(device)):
        write_generators(device, states["torch"])
    else:  # saved beside a GPU and loaded without, or the other way
        torch.set_rng_state(states["torch"][0])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def versions() -> dict[str, str]:
    """Return what writes a checkpoint; planner has no version in a tree that is not installed."""
    found = {"torch": str(torch.__version__)}
    with suppress(metadata.PackageNotFoundError):
        found["planner"] = metadata.version("planner")
    return found
