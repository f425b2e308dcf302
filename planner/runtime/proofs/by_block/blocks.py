"""A block class under a layout: every rank's local program against the whole block.

Ranks of a stage's inner axes (those that blocks are lowered on) run what they would run in
training, in lock step, on pieces of what the whole block took. Outputs, gradients of inputs and of
parameters, and buffers written are compared with the pieces of the whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from planner.errors import PlannerError
from planner.language.across.cut.gathers import BATCH
from planner.language.graph import Program
from planner.language.layout.axes import Degrees, lowered_axes
from planner.language.layout.placements import Placements
from planner.language.layout.process_mesh import ProcessMesh
from planner.language.lowering.wiring import BlockPlacements
from planner.runtime.proofs.by_block.facts import CPU, Fact
from planner.runtime.proofs.by_block.simulate.block_run import BlockRun, ParamGradient
from planner.runtime.proofs.by_block.simulate.lockstep import Call, LockStep, OutOfStep
from planner.runtime.proofs.by_block.simulate.pieces_of import (
    largest_difference,
    largest_entry,
    of_gradient,
    of_param_gradient,
    sums_over,
    value_of,
)
from planner.runtime.stage.program_fx import to_graph_module

ROUNDINGS = 100.0
"""How many times its measured rounding a tensor may differ by. Of the models in the tests none
comes beyond 3, of Llama-3-405B at full width 5.4; faults of sharding rules in the tests are beyond
1000 times in fp32, too."""

DETERMINED = {torch.float64: 1e-7, torch.float32: 1e-2}
"""Rounding of an output, over its largest entry, beyond which nothing is shown: two right runs
come as far apart."""

_SAMPLED = 2**22
"""Entries of a large gradient whose rounding is looked at."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What came of one class under one layout.

    Attributes:
        faults: differences beyond rounding, and other failures, as sentences.
        times_rounding: the worst difference over its rounding.
        calls: collectives of each simulated rank, in the forward and in the backward.
    """

    faults: tuple[str, ...]
    times_rounding: float = 0.0
    calls: Mapping[int, tuple[tuple[Call, ...], tuple[Call, ...]]] = field(default_factory=dict)


@dataclass
class _Worst:
    """Faults so far, and the worst difference over its rounding. Mutable: it takes more."""

    where: str
    eps: float
    faults: list[str] = field(default_factory=list)
    times: float = 0.0

    def add(
        self, what: str, found: Tensor, expected: Tensor, rounding: float, ranks: tuple[int, ...]
    ) -> None:
        """Compare a piece."""
        apart = largest_difference(found, expected)
        if apart == 0:
            return
        at_least = max(rounding, self.eps * largest_entry(expected))
        times = apart / at_least if at_least else float("inf")
        self.times = max(self.times, times)
        if not times <= ROUNDINGS:
            by = "in shape or dtype" if found.shape != expected.shape else f"by {apart:.2e}"
            on = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}"
            more = ", ..." if len(ranks) > 4 else ""
            self.faults.append(
                f"{what} of {self.where} differs {by} on simulated {on}{more}, {times:.3g} times "
                f"its rounding ({ROUNDINGS:.0f} are allowed)"
            )


def simulated_mesh(degrees: Degrees) -> ProcessMesh:
    """Return a mesh of the axes that blocks are lowered on, with ranks 0, 1, ..."""
    axes = [axis.name for axis in reversed(lowered_axes())]
    shape = tuple(degrees[axis] for axis in axes)
    count = 1
    for size in shape:
        count *= size
    return ProcessMesh(axes=tuple(axes), shape=shape, ranks=tuple(range(count)))


def check_class(
    fact: Fact,
    local: Callable[[int], Program],
    placements: BlockPlacements,
    degrees: Degrees,
    *,
    draws: Callable[[], Any],
) -> Checked:
    """Compare a class's local programs (of each simulated rank) with the whole block."""
    mesh, program = simulated_mesh(degrees), fact.program
    where = f"block class {program.name} ({degrees})"
    in_places, param_places, out_places = placements
    places = dict(zip((*program.inputs, *program.params), (*in_places, *param_places), strict=True))
    dtype = next((t.dtype for t in fact.run.outputs if t.is_floating_point()), torch.float64)
    worst = _Worst(where, torch.finfo(dtype).eps)

    def body(rank: int) -> Any:
        values = {
            name: value_of(fact.run.values[name], placed, mesh, rank, name)
            for name, placed in places.items()
        }
        buffers = {n for n in program.params if program.tensor[n].kind == "buffer"}
        # (The program writes into buffers.)
        values |= {name: values[name].clone() for name in buffers}
        own = local(rank)
        run = BlockRun(to_graph_module(own, {**world.groups(rank), BATCH: None}, CPU), own)
        with draws():
            outputs = run.forward(values)
            # Collectives so far are the forward's; those behind them the backward's.
            ahead = world.calls(rank)
            given = [
                None if g is None else value_of(g, of_gradient(placed), mesh, rank)
                for g, placed in zip(fact.run.cotangents, out_places, strict=True)
            ]
            inputs, params = run.backward(given)
        held = {name: values[name] for name in buffers}
        return outputs, inputs, params, held, len(ahead)

    try:
        with LockStep(mesh) as world:
            made = world.run(body)
            calls = {
                rank: (world.calls(rank)[: found[4]], world.calls(rank)[found[4] :])
                for rank, found in made.items()
            }
            _compare(fact, made, mesh, places, out_places, worst)
    except OutOfStep as error:
        return Checked(faults=(f"{where}: collectives do not match: {error}",))
    except (PlannerError, RuntimeError, ValueError, TypeError, IndexError) as error:
        # A program that does not fit its pieces fails in an op.
        on = "".join(f", {note}" for note in getattr(error, "__notes__", ())[:1])
        text = str(error).splitlines()[0]
        return Checked(faults=(f"{where} does not run{on}: {text}",))
    return Checked(faults=tuple(worst.faults), times_rounding=worst.times, calls=calls)


def _compare(
    fact: Fact,
    made: Mapping[int, Any],
    mesh: ProcessMesh,
    places: Mapping[str, Placements],
    out_places: tuple[Placements, ...],
    worst: _Worst,
) -> None:
    program, run, moved = fact.program, fact.run, fact.moved
    for at, (name, placed) in enumerate(zip(program.outputs, out_places, strict=True)):
        rounding = _apart(moved.outputs[at], run.outputs[at])
        most = DETERMINED.get(run.outputs[at].dtype, 0.0) * largest_entry(run.outputs[at])
        if rounding > most:
            worst.faults.append(
                f"output {name} of {worst.where} is not determined here: moving what the block "
                f"takes by one unit in the last place changes it by {rounding:.2e}"
            )
        for ranks, found in _sums(placed, mesh, {r: each[0][at] for r, each in made.items()}):
            expected = value_of(run.outputs[at], of_gradient(placed), mesh, ranks[0])
            worst.add(f"output {name}", found, expected, rounding, ranks)
    for name in program.inputs:
        whole = run.input_grads[name]
        if whole is None:
            whole = torch.zeros_like(run.values[name])
        if not program.tensor[name].requires_grad:
            continue
        other = moved.input_grads[name]
        rounding = 0.0 if other is None else _apart(other, whole)
        placed = of_gradient(places[name])
        for rank, each in made.items():
            expected = value_of(whole, placed, mesh, rank)
            found = each[1][name]
            found = torch.zeros_like(expected) if found is None else found
            worst.add(f"gradient of input {name}", found, expected, rounding, (rank,))
    for name in run.held:
        for rank, each in made.items():
            expected = value_of(run.held[name], places[name], mesh, rank)
            rounding = _apart(moved.held[name], run.held[name])
            worst.add(f"buffer {name}", each[3][name], expected, rounding, (rank,))
    for name in run.param_grads:
        terms = {rank: each[2][name] for rank, each in made.items()}
        _compare_param(
            program.tensor[name].fqn or name, run.param_grads[name], moved.param_grads[name],
            terms, of_param_gradient(places[name], mesh), mesh, worst,
        )  # fmt: skip


def _compare_param(
    name: str,
    whole: ParamGradient,
    moved: ParamGradient,
    terms: Mapping[int, ParamGradient],
    placed: Placements,
    mesh: ProcessMesh,
    worst: _Worst,
) -> None:
    """Compare a parameter's gradient, one whole one and one piece in memory at a time."""
    # The moved gradient is sampled and dropped before the other is made: memory has a single whole
    # gradient at a time.
    sample = _sampled(moved.make())
    expected = whole.make()
    rounding = _apart(sample, _sampled(expected))
    for ranks in sums_over(placed, mesh):
        found: Tensor | None = None
        for rank in ranks:
            term = terms[rank].make()
            found = term if found is None else found.add_(term)
        assert found is not None
        piece = value_of(expected, of_gradient(placed), mesh, ranks[0])
        worst.add(f"gradient of {name}", found, piece, rounding, ranks)


def _sampled(tensor: Tensor) -> Tensor:
    """Return some rows, evenly spaced, of a tensor that is large."""
    if not tensor.dim() or tensor.numel() <= _SAMPLED:
        return tensor
    step = -(-tensor.numel() // _SAMPLED)
    return tensor[::step].clone()


def _sums(
    placed: Placements, mesh: ProcessMesh, tensors: Mapping[int, Tensor]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    for ranks in sums_over(placed, mesh):
        found = tensors[ranks[0]]
        for rank in ranks[1:]:
            found = found + tensors[rank]
        yield ranks, found


def _apart(moved: Tensor, tensor: Tensor) -> float:
    apart = largest_difference(moved, tensor)
    return 0.0 if apart == float("inf") else apart
