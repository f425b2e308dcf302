"""What other runtimes save for a backward where ours saves something else.

fused_saves      a fused kernel saves what it takes and makes the rest again: a gated activation
                 saves the product before it, rotary positions save nothing of what they turn
regathers        what tp ranks gather for a product is saved as each rank's part, and gathered
                 again for the weight's gradient (Korthikanti et al. 2022, arXiv 2205.05198,
                 section 4.2.2)
copies_values    attention's values are a copy, not a part of the product that made them
loss_bytes       how much memory a loss over parts of a vocabulary takes for a logit
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from costmodel.execution.executed_kernels import kernels_of
from costmodel.execution.execution import Execution
from costmodel.memory.saved import SavedInstead
from planner.graph import Op, Program
from planner.layout.placement import Replicate, Shard, parse_placement
from planner.layout.redistribution.redistribute import REDISTRIBUTE
from planner.ops.families.losses.cross_entropy import SIZED_CROSS_ENTROPY, VOCAB_CROSS_ENTROPY
from planner.ops.record import family_of
from profiles.lookup.families import ATTENTION


def saved_instead(local: Program, execution: Execution) -> SavedInstead:
    """Return, by op of a bound program, what its backward makes again, each with what is saved for
    that instead.
    """
    if execution.prices == "profile":
        return {}
    found: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    if execution.fused_saves:
        for ops in kernels_of(local, execution):
            # Where another kernel saves what this one makes, that is saved all the same.
            inside = _inside(ops)
            for op in ops:
                found[op.name] |= inside
    if execution.copies_values:
        for op in local.ops:
            if family_of(op.target).arithmetic == ATTENTION:
                found[op.name][op.inputs[2]] = ()
    if execution.regathers:
        gathered = {op.outputs[0]: op.inputs for op in local.ops if _gathers(op, local)}
        for op in local.ops:
            found[op.name] |= {name: gathered[name] for name in op.inputs if name in gathered}
    return found


def _inside(ops: Iterable[Op]) -> dict[str, tuple[str, ...]]:
    """Return what a kernel makes, each with what the kernel takes for it."""
    taken: dict[str, tuple[str, ...]] = {}
    for op in ops:
        sources = dict.fromkeys(name for of in op.inputs for name in taken.get(of, (of,)))
        taken |= {name: tuple(sources) for name in op.outputs}
    return taken


def _gathers(op: Op, local: Program) -> bool:
    if op.target != REDISTRIBUTE or not local.tensor[op.inputs[0]].requires_grad:
        return False
    source, target = (parse_placement(str(text)) for text in op.args[2:4])
    return isinstance(source, Shard) and isinstance(target, Replicate)


def with_sized_losses(program: Program, bytes_per_logit: int) -> Program:
    """Return a local program whose losses over parts of a vocabulary take so much memory."""
    if not any(op.target == VOCAB_CROSS_ENTROPY for op in program.ops):
        return program
    sized = (("bytes_per_logit", bytes_per_logit),)
    ops = (
        replace(op, target=SIZED_CROSS_ENTROPY, kwargs=(*op.kwargs, *sized))
        if op.target == VOCAB_CROSS_ENTROPY
        else op
        for op in program.ops
    )
    return replace(program, ops=tuple(ops))
