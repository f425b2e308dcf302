"""N6: each fault put into what the runtime derives from a plan is found, in the part it is in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from planner.language.graph import Op, Program, Ref
from planner.language.layout.placement import Replicate, Shard
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.lowering.lowering import ONCE, local_program
from planner.language.lowering.routes import Part, Routes
from planner.language.ops.families.products.rings import RING
from planner.language.schedule.jobs import forward
from planner.runtime.process import collectives
from planner.runtime.proofs.by_block.cut import cut_down
from planner.runtime.proofs.by_block.prove import Derived, derive
from planner.runtime.stage.calls import local_ops
from tests.runtime.check.by_block.cases import captured, plan_of, proof_of
from tests.runtime.test_cuts_of_sequences import Way, cut_so

BLOCKS, WIRING, MESSAGES, PARTS, TABLE, HELD, VALUES, ORDER = (
    "blocks", "wiring", "messages", "parts of messages", "job table", "parameters",
    "values between", "collectives",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is broken, in which plan, and where the proof must say so."""

    part: str
    says: str
    change: Callable[[Derived], Derived]
    model: str = "gpt"
    options: Any = (("tp", 2), ("pp", 2), ("dp", 2), ("zero_stage", 1))


# ------------------------------------------------------------------ sharding rules and lowering


def programs(change: Callable[[Program, int], Program]) -> Callable[[Derived], Derived]:
    """Break what ranks run for a layer: `change` gets the program and the simulated rank."""

    def broken(derived: Derived) -> Derived:
        def local(graph, plan, index, degrees, size, rank):
            own = local_program(graph, plan, index, degrees=degrees, microbatch_size=size)
            return change(own, rank) if "layers" in own.name else own

        return replace(derived, local=local)

    return broken


def moved(program: Program, at: Callable[[Op], bool], **to: Any) -> Program:
    """Change arguments of the first redistribution that `at` picks, by their names."""
    names = ("ref", "axis", "src", "dst", "grad_partial")
    op = next(op for op in program.ops if op.target == REDISTRIBUTE and at(op))
    args = tuple(to.get(name, arg) for name, arg in zip(names, op.args, strict=True))
    return with_op(program, op, replace(op, args=args))


def with_op(program: Program, op: Op, *others: Op) -> Program:
    place = program.ops.index(op)
    return replace(program, ops=(*program.ops[:place], *others, *program.ops[place + 1 :]))


def goes(src: str, dst: str, axis: str = "tp", grad_partial: bool | None = None):
    def picks(op: Op) -> bool:
        _, on, a, b, partial = op.args
        return (on, a, b) == (axis, src, dst) and grad_partial in (None, partial)

    return picks


def without_sum(program, rank):
    """The output of a row-parallel product stays a term."""
    return moved(program, goes("P", "R"), src="R")


def without_sum_back(program, rank):
    """The input of a column-parallel product leaves its gradient a term."""
    return moved(program, goes("R", "R", grad_partial=True), grad_partial=False)


def sum_of_wholes(program, rank):
    """What every rank has whole is summed."""
    op = next(op for op in program.ops if op.target == "aten.layer_norm.default")
    summed = Op(
        name="again", target=REDISTRIBUTE, outputs=(op.outputs[0],),
        args=(Ref(f"{op.outputs[0]}_one"), "tp", "P", "R", True),
    )  # fmt: skip
    one = replace(op, outputs=(f"{op.outputs[0]}_one",))
    return with_op(program, op, one, summed)


def bias_on_all(program, rank):
    """Each rank adds the whole bias to its term: it comes in as often as there are ranks."""
    op = next(op for op in program.ops if op.target == REDISTRIBUTE and goes("R", "P")(op))
    return with_op(program, op, replace(op, args=(*op.args[:3], "R", op.args[4])))


def other_dim(program, rank):
    """Pieces of samples are gathered as pieces of the sequence."""
    return moved(program, goes("S(0)", "R"), src="S(1)")


def nonlinear_on_terms(program, rank):
    """A norm runs on terms of a sum, which is taken behind it: wrong for what is not linear."""
    op = next(op for op in program.ops if op.target == REDISTRIBUTE and goes("P", "S(0)")(op))
    return with_op(program, op, replace(op, args=(*op.args[:2], "R", *op.args[3:])))


def other_scale(program, rank):
    """Attention scales by what a rank's share of the heads would be."""
    op = next(op for op in program.ops if "attention" in op.target)
    return with_op(program, op, replace(op, kwargs=(*op.kwargs, ("scale", 0.25))))


def fewer_on_one(program, rank):
    """Rank 1 leaves out a collective."""
    return without_sum(program, rank) if rank == 1 else program


def other_kind_on_one(program, rank):
    """Rank 1 gathers where rank 0 sums."""
    return moved(program, goes("P", "S(0)"), src="S(1)") if rank == 1 else program


def swapped(program, rank):
    """Rank 1 gathers values before keys."""
    first, second = [
        op for op in program.ops if op.target == REDISTRIBUTE and goes("S(2)", "R", "cp")(op)
    ][:2]
    if rank != 1:
        return program
    place = program.ops.index(first)
    ops = [op for op in program.ops if op not in (first, second)]
    return replace(program, ops=(*ops[:place], second, first, *ops[place:]))


def not_causal(program, rank):
    """Each part of the sequence sees its own first positions as the sequence's."""
    op = next(op for op in program.ops if op.target == "planner.causal_attention")
    return with_op(program, op, replace(op, args=(*op.args[:6], 2, *op.args[7:])))


# -------------------------------------------------------------------- wiring, messages, tables


def edges(change: Callable[[tuple], tuple]) -> Callable[[Derived], Derived]:
    return lambda derived: replace(derived, edges=change(derived.edges))


def wiring(stage: int, **fields: Callable[[Any], Any]) -> Callable[[Derived], Derived]:
    def broken(derived: Derived) -> Derived:
        wirings = list(derived.wirings)
        changed = {name: make(getattr(wirings[stage], name)) for name, make in fields.items()}
        wirings[stage] = replace(wirings[stage], **changed)
        return replace(derived, wirings=tuple(wirings))

    return broken


def on_the_wire(**fields: Any) -> Callable[[Derived], Derived]:
    """The message lies otherwise on its way; both ends are wired for it."""

    def broken(derived: Derived) -> Derived:
        (edge,) = derived.edges
        other = replace(edge, **fields)
        sender, taker = derived.wirings
        sender = replace(sender, outgoing=(other,), outputs=((other.tensor, other.sent),))
        return replace(derived, edges=(other,), wirings=(sender, replace(taker, incoming=(other,))))

    return broken


def parts(change: Callable[[list[Part]], list[Part]]) -> Callable[[Derived], Derived]:
    class Broken(Routes):
        def parts(self, edge, cut, *, is_grad):
            return tuple(change(list(super().parts(edge, cut, is_grad=is_grad))))

    return lambda derived: replace(derived, routes=lambda plan: Broken(plan=plan))


def jobs(change: Callable[[list[list]], Any]) -> Callable[[Derived], Derived]:
    def broken(derived: Derived) -> Derived:
        rows = [list(row) for row in derived.schedule.jobs]
        change(rows)
        schedule = replace(derived.schedule, jobs=tuple(map(tuple, rows)))
        return replace(derived, schedule=schedule)

    return broken


def queues(change: Callable[[list[list]], Any]) -> Callable[[Derived], Derived]:
    def broken(derived: Derived) -> Derived:
        def made(schedule, edges):
            rows = [list(row) for row in derived.queues(schedule, edges)]
            change(rows)
            return rows

        return replace(derived, queues=made)

    return broken


# ------------------------------------------------------------------------------- what ranks hold


def held(rank: int, change: Callable[[dict], Any]) -> Callable[[Derived], Derived]:
    def broken(derived: Derived) -> Derived:
        def of(number: int):
            own = dict(derived.held(number))
            if number == rank:
                change(own)
            return own

        return replace(derived, held=of)

    return broken


def with_piece(name: str, change: Callable[[Any], Any]) -> Callable[[dict], Any]:
    def of(own: dict) -> None:
        key = next(k for k, holding in own.items() if holding.meta.fqn == name)
        own[key] = replace(own[key], piece=change(own[key].piece))

    return of


def shortened(piece):
    (start, length), *rest = piece.runs[0]
    return replace(piece, runs=(((start, length - 1), *rest), *piece.runs[1:]))


def shifted(by: int):
    def of(piece):
        runs = tuple((start + by, length) for start, length in piece.runs[0])
        return replace(piece, runs=(runs, *piece.runs[1:]))

    return of


def without(name: str) -> Callable[[dict], Any]:
    def of(own: dict) -> None:
        del own[next(k for k, holding in own.items() if holding.meta.fqn == name)]

    return of


def renumbered(own: dict) -> None:
    for key, holding in own.items():
        if holding.copy is not None and holding.copies > 1:
            own[key] = replace(holding, copy=(holding.copy + 1) % holding.copies)
            return
    raise AssertionError("no copies")


def strange(own: dict) -> None:
    holding = next(iter(own.values()))
    name = next(n for n in captured("gpt")[0].tensor if n.endswith("head_weight"))
    own[name] = replace(holding, meta=captured("gpt")[0].tensor[name])


WEIGHT = "layers.0.up.weight"

FAULTS = {
    # sharding rules and lowering
    "a sum left out": Fault(part=BLOCKS, says="output", change=programs(without_sum)),
    "a sum left out in the backward": Fault(
        part=BLOCKS, says="gradient", change=programs(without_sum_back)
    ),
    "a sum of what is whole": Fault(part=BLOCKS, says="output", change=programs(sum_of_wholes)),
    "a bias added by every rank": Fault(part=BLOCKS, says="output", change=programs(bias_on_all)),
    "pieces put together along another dim": Fault(
        part=BLOCKS, says="layers", change=programs(other_dim)
    ),
    "a norm of terms": Fault(part=BLOCKS, says="output", change=programs(nonlinear_on_terms)),
    "another scale": Fault(part=BLOCKS, says="output", change=programs(other_scale)),
    "a collective that one rank leaves out": Fault(
        part=BLOCKS, says="rank 0.*rank 1", change=programs(fewer_on_one)
    ),
    "another collective on one rank": Fault(
        part=BLOCKS, says="rank 0 runs reduce_scatter.*rank 1", change=programs(other_kind_on_one)
    ),
    "collectives swapped on one rank": Fault(
        part=BLOCKS, says="layers", change=programs(swapped), options=(("cp", 2), ("pp", 2))
    ),
    "a mask of other positions": Fault(
        part=BLOCKS, says="output", change=programs(not_causal), options=(("cp", 2), ("pp", 2))
    ),
    # wiring
    "a message left out": Fault(
        part=WIRING, says="does not go from stage 0 to stage 1", change=edges(lambda e: ())
    ),
    "a message twice": Fault(part=WIRING, says="2 times", change=edges(lambda e: e * 2)),
    "a message of another shape": Fault(
        part=WIRING, says="is sent as", change=on_the_wire(dtype="int64")
    ),
    "another tensor on a message": Fault(
        part=WIRING, says="sends other",
        change=wiring(0, outputs=lambda pairs: (("other", pairs[0][1]),)),
    ),
    "a batch input that a stage lacks": Fault(
        part=WIRING, says="does not get", change=wiring(1, side_inputs=lambda names: ())
    ),
    "a loss that no stage returns": Fault(
        part=WIRING, says="have the loss", change=wiring(1, has_loss=lambda is_there: False)
    ),
    "a message that is not taken": Fault(
        part=MESSAGES, says="taken 0 times", change=wiring(1, incoming=lambda edges: ())
    ),
    "another piece on the wire": Fault(
        part=VALUES, says="stage",
        change=lambda derived: on_the_wire(
            sent=derived.edges[0].sent.on("tp", Shard(1)),
            taken=derived.edges[0].taken.on("tp", Shard(2)),
        )(derived),
    ),
    "pieces that are taken as whole": Fault(
        part=VALUES, says="arrive",
        change=lambda derived: on_the_wire(
            sent=derived.edges[0].sent.on("tp", Shard(2)),
            taken=derived.edges[0].taken.on("tp", Replicate()),
        )(derived),
    ),
    "a part that is not sent": Fault(part=PARTS, says="needs", change=parts(lambda p: p[1:])),
    "a part sent twice": Fault(part=PARTS, says="once", change=parts(lambda p: [*p, p[0]])),
    "a part from the wrong replica": Fault(
        part=PARTS, says="it has",
        change=parts(lambda p: [p[0]._replace(source=p[-1].source), *p[1:]]),
    ),
    # tables
    "a job left out": Fault(part=TABLE, says="no F", change=jobs(lambda rows: rows[0].pop(0))),
    "a job twice": Fault(
        part=TABLE, says="computes again", change=jobs(lambda rows: rows[1].append(rows[1][0]))
    ),
    "a backward before its forward": Fault(
        part=TABLE, says="depend|deadlock", change=jobs(lambda rows: rows[1].reverse())
    ),
    "a job on another rank": Fault(
        part=TABLE, says="is on pp rank",
        change=jobs(lambda rows: rows.__setitem__(1, [forward(0, 0), *rows[1]])),
    ),
    "sends in another order than receives": Fault(
        part=MESSAGES, says="deadlock", change=queues(lambda rows: rows[0].reverse())
    ),
    # parameters
    "a parameter that a rank lacks": Fault(
        part=HELD, says=f"rank 1 lacks {WEIGHT}", change=held(1, without(WEIGHT))
    ),
    "a parameter that no block uses": Fault(
        part=HELD, says="no block of its stages uses", change=held(0, strange)
    ),
    "a gap in an optimizer shard": Fault(
        part=HELD, says="elements .* in no piece of optimizer shards",
        change=held(0, with_piece(WEIGHT, shortened)),
    ),
    "an optimizer shard that two have": Fault(
        part=HELD, says="optimizer shard", change=held(0, with_piece(WEIGHT, shifted(4)))
    ),
    "a piece of another rank": Fault(
        part=HELD, says="the plan cuts", change=held(0, with_piece(WEIGHT, shifted(64))),
        options=(("tp", 2),),
    ),
    "a copy that two ranks write": Fault(
        part=HELD, says="numbered", change=held(1, renumbered), options=(("dp", 2),)
    ),
    "replicas that sum other pieces": Fault(
        part=ORDER, says="hold other pieces", change=held(1, with_piece(WEIGHT, shortened)),
        options=(("dp", 2),),
    ),
    "tied copies of other pieces": Fault(
        part=ORDER, says="different pieces", model="tied-embedding",
        change=held(3, with_piece("token.weight", shifted(1))), options=(("tp", 2), ("pp", 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    """N6: more than twenty faults, each in the part of the proof that it belongs to."""
    fault = FAULTS[name]
    proof = proof_of(fault.model, plan(fault.model, fault.options), change=fault.change)
    assert not proof.passed
    found = [
        text for part in proof.parts if part.name.startswith(fault.part) for text in part.faults
    ]
    assert any(re.search(fault.says, text) for text in found), proof.parts


@cache
def plan(model: str, options: Any):
    return plan_of(model, **dict(options))


# ------------------------------------------------------------- faults of the runtime's own ops


def reversed_pieces(x, group, dim):
    parts = collectives.size(group)
    given = collectives._funcol.all_gather_into_tensor(x.contiguous(), parts, group)
    return torch.cat(collectives._funcol.wait_tensor(given).chunk(parts)[::-1], dim)


def first_of_sums(x, group, how):
    return x


@pytest.mark.parametrize(
    ("module", "name", "broken", "part"),
    [
        (collectives, "_all_gather", reversed_pieces, BLOCKS),
        (local_ops, "reduce_over", first_of_sums, BLOCKS),
    ],
)
def test_a_fault_of_the_runtime_s_own_ops_is_found(monkeypatch, module, name, broken, part):
    """N6: gathers in another order; a cross entropy that leaves out the other ranks' classes."""
    monkeypatch.setattr(module, name, broken)
    proof = proof_of("gpt", plan("gpt", (("tp", 2), ("pp", 2))))
    assert any(each.faults for each in proof.parts if each.name.startswith(part))


def ring(program: Program, **to: Any) -> Program:
    """Change what attention over a ring is told of its pieces, rounds or mask."""
    names = {"high": 4, "segments": 10, "rounds": 11}
    op = next(op for op in program.ops if op.target == RING)
    args, kwargs = list(op.args), dict(op.kwargs)
    for name, value in to.items():
        if name in kwargs:
            kwargs[name] = value
        else:
            args[names[name]] = value
    return with_op(program, op, replace(op, args=tuple(args), kwargs=tuple(kwargs.items())))


RINGS: dict[str, tuple[Callable[[Program, int], Program], str]] = {
    "a round short": (lambda program, rank: ring(program, rounds=(0,)), "output"),
    "a round short on one": (
        lambda program, rank: ring(program, rounds=(0,) if rank else (0, 1)),
        "collectives",
    ),
    "pieces of others": (lambda program, rank: ring(program, segments=1), "output"),
    "another mask": (lambda program, rank: ring(program, high=3), "output"),
    "pieces not mirrored": (lambda program, rank: ring(program, mirrored=False), "output"),
}
"""Faults of attention over a ring, and what is said of the block."""


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a round short on one",
        "pieces not mirrored",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in RINGS
            if "on one" not in name and "mirrored" not in name
        ),
    ],
)
def test_a_fault_of_a_ring_is_found(name):
    """N6, B10: and without a fault there is none."""
    change, says = RINGS.get(name, (None, ""))
    way = cut_so(captured("gpt")[0], Way("ring", 2, mirrored=True), cp=2)
    proof = proof_of("gpt", way, change=None if change is None else programs(change))
    found = [text for part in proof.parts if part.name.startswith(BLOCKS) for text in part.faults]
    assert proof.passed == (not name)
    assert bool(found) == bool(name)
    assert not found or any(says in text for text in found)


def test_a_gradient_counted_by_every_rank_is_found(monkeypatch):
    """N6: along cp a parameter used whole leaves its gradient on one rank."""
    options = (("cp", 2), ("tp", 2))
    graph, _ = captured("encoder-decoder")
    own = plan("encoder-decoder", options)
    counted = [
        op
        for index in range(len(graph.classes))
        for op in local_program(graph, own, index, degrees=own.degrees, microbatch_size=2).ops
        if op.target == ONCE
    ]
    if not counted:
        pytest.skip("no parameter is used whole by every rank")
    monkeypatch.setattr(local_ops, "count_gradient_once", lambda x, group: x.view_as(x))
    assert not proof_of("encoder-decoder", own).passed


def test_what_is_derived_is_right():
    """The faults above are the only ones."""
    for fault in {(f.model, f.options) for f in FAULTS.values()}:
        assert proof_of(fault[0], plan(*fault)).passed
    assert derive(captured("gpt")[0], plan_of("gpt", pp=2)).edges


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.part == BLOCKS])
def test_a_fault_of_a_block_is_found_in_fp32(name):
    """N6: where memory stops at fp32, as for the largest models."""
    fault = FAULTS[name]
    own = plan(fault.model, fault.options)
    graph, source = captured(fault.model)
    needed = max(num for _, num in cut_down(graph, own, source, memory_bytes=0).too_large)
    right = proof_of(fault.model, own, memory_bytes=needed)
    assert right.passed
    assert any("fp32" in cut for cut in right.cuts)
    wrong = proof_of(fault.model, own, change=fault.change, memory_bytes=needed)
    (blocks,) = (part for part in wrong.parts if part.name.startswith(BLOCKS))
    assert any(re.search(fault.says, text) for text in blocks.faults)
    if "times its rounding" in blocks.faults[0]:
        assert blocks.times_rounding > 1000
