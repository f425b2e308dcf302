"""Why a stack does not express a choice, in words; empty where it does.

Emitters refuse plans by these (`planner.emit.declared`), and a search leaves out what they refuse
(`planner.language.stacks.expressed`). Each reads the stack's declaration and one choice of a plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from planner.language.graph import ModelGraph
from planner.language.lowering.experts import experts_params
from planner.language.plan.parts import Precision, scaling_named
from planner.language.schedule import Job, build_schedule, find_schedule
from planner.language.schedule.placements import fold_placement, loop_placement
from planner.language.stacks.stack import CpKind, Recomputed, Stack
from planner.language.stacks.tensor_parallel import LaidOut, UsualTp


def why_no_zero(stack: Stack, zero: int) -> str:
    """Of a stage of ZeRO."""
    if zero in stack.zero_stages:
        return ""
    return f"{stack.title} has ZeRO {_listed(stack.zero_stages)}"


def why_not_beside(stack: Stack, feature: str, zero: int) -> str:
    """Of a feature beside a stage of ZeRO."""
    stages = stack.zeros_beside(feature)
    # A stage that it never has is refused as such.
    if zero in stages or zero not in stack.zero_stages:
        return ""
    return f"{stack.title} has this beside ZeRO {_listed(stages)} alone"


def why_not_microbatches(stack: Stack, *, pp: int, vpp: int, num_microbatches: int) -> str:
    """Of the number of microbatches of a pipeline."""
    if stack.whole_groups and vpp > 1 and num_microbatches % pp:
        return f"{stack.title} interleaves a multiple of pp={pp} microbatches"
    return ""


def why_no_schedule(
    stack: Stack, jobs: Sequence[Sequence[Job]], *, pp: int, vpp: int, num_microbatches: int
) -> str:
    """Of a pipeline's job table, a row a rank."""
    sizes = {"pp": pp, "vpp": vpp, "num_microbatches": num_microbatches}
    own = [name for name in stack.schedules or () if find_schedule(name).why_not(**sizes) is None]
    if any(build_schedule(name, **sizes).jobs == jobs for name in own):
        return ""
    names = " or ".join(own) or "no schedule"
    return f"with vpp={vpp} {stack.title} has the job table of {names} and no other"


def why_not_placed(stack: Stack, homes: Sequence[int], *, pp: int, vpp: int) -> str:
    """Of the pp rank of each stage."""
    placements = [loop_placement(pp, vpp)]
    if stack.schedules is None and vpp == 2:
        placements.append(fold_placement(pp, 2))
    if tuple(homes) in placements:
        return ""
    return f"{stack.title} deals stages round-robin, or two a rank in a V"


def why_no_recompute(stack: Stack, kinds: Collection[Recomputed]) -> str:
    """Of what stages recompute of their layers: a kind for each that differs."""
    if "by layer" in kinds or len(set(kinds)) > 1:
        whose = "layers" if "by layer" in kinds else "stages"
        return f"{stack.title} recomputes the same of all {whose}"
    if set(kinds) <= set(stack.recomputes):
        return ""
    return f"{stack.title} recomputes of layers {_listed(stack.recomputes)}, not the plan's ops"


def why_no_precision(stack: Stack, precision: Precision, dtype: str) -> str:
    """Of a precision of a model whose parameters have a dtype."""
    if precision in stack.precisions:
        return ""
    if scaling_named(precision):
        own = [name for name in stack.precisions if scaling_named(name)]
        return (
            f"{stack.title} has no products in 8-bit floats scaled as {precision} scales them; use "
            f"`precision` {' or '.join(own or stack.precisions[:1])}"
        )
    if precision != "model":
        return f"{stack.title} has fp32 master weights beside {_listed(stack.precisions)} alone"
    if dtype in stack.own_dtypes:
        return ""
    kept = f"{_listed(stack.own_dtypes)} alone is kept" if stack.own_dtypes else "none is kept"
    return (
        f"the model is {dtype}, and of the dtypes of models {kept} in {stack.title}; others train "
        "in 16 bits with fp32 master weights (`precision` bf16)"
    )


def why_not_tp(usual: UsualTp | None, tp: int) -> str:
    """Of so many ranks of tp."""
    return usual.why_not(tp) if usual is not None and tp > 1 else ""


def why_not_placed_on_tp(stack: Stack) -> str:
    """Of any placements of ops on tp."""
    return "" if stack.tensor_parallel else f"{stack.title} places tensors by rules of its own"


def why_not_laid_out(stack: Stack, laid: LaidOut) -> str:
    """Of placements of ops on tp."""
    ways = stack.tensor_parallel
    if ways is None:
        return why_not_placed_on_tp(stack)
    needed = UsualTp(model=laid.model, ways=ways).needs_sequence_parallel
    if needed and not laid.sequence_parallel:
        what = "trains experts on tp" if ways.sequence_parallel == "with experts" else "has tp"
        return f"{stack.title} {what} with sequence parallelism alone"
    return laid.differs_from_usual_tp()


def why_not_experts(stack: Stack, laid: LaidOut) -> str:
    """Of the matrices of experts on tp where they have no mesh of their own."""
    ways = stack.tensor_parallel
    if ways is None or laid.experts_on_tp in ways.experts:
        return ""
    or_none = ", or of none" if "whole" in ways.experts else ""
    return f"{stack.title} cuts the matrices of all experts on tp{or_none}"


def why_not_ep(stack: Stack, graph: ModelGraph) -> str:
    """Of experts on ranks of their own."""
    if not stack.experts_named:
        return ""
    held = {graph.tensor[name].fqn for name in experts_params(graph)}
    for fqn in sorted(held):
        if not re.fullmatch(stack.experts_named, fqn):
            return f"{stack.title} finds experts by names, and {fqn} is none that it has"
    # Beside its experts a block's router is looked for by name, too.
    routers = {f"{fqn.rpartition('.experts.')[0]}.gate.weight" for fqn in held}
    missing = sorted(routers - {meta.fqn for meta in graph.params})
    return f"{stack.title} finds routers by names, and there is no {missing[0]}" if missing else ""


def why_no_cp(stack: Stack, kind: CpKind, cp: int, seq_len: int) -> str:
    """Of sequences split over cp."""
    if kind == "striped":
        return (
            f"on cp {stack.title} has its own cut of sequences, and the plan has several pieces of "
            "each on a rank"
        )
    if kind not in stack.cp_kinds:
        told = {
            "gathered": "gathers keys and values",
            "heads": "deals heads",
            "ring": "passes keys and values on",
        }
        own = " or ".join(told[kind] for kind in stack.cp_kinds)
        return f"on cp attention of {stack.title} {own}, and the plan's does not"
    return why_not_pieces(stack, cp, seq_len)


def why_not_pieces(stack: Stack, cp: int, seq_len: int) -> str:
    """Of the length of sequences on so many ranks of cp."""
    if cp == 1 or seq_len % (stack.cp_pieces * cp) == 0:
        return ""
    return f"{stack.title} needs sequences ({seq_len}) that {stack.cp_pieces} * cp divides"


def why_not_counted(stack: Stack, seq_len: int) -> str:
    """Of microbatches of samples of a length, 0 where they have none."""
    if seq_len or not stack.counts_tokens:
        return ""
    return f"{stack.title} counts tokens, and the batch has no sequences of one length"


def _listed(values: Collection[object]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else str(last)
