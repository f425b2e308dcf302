"""The backward of a compiled block, as the steps of `backward_facts` with a fused kernel as one.

Inside a kernel nothing has memory: neither gradients that it hands on to itself, nor temporaries of
its ops, nor what it makes again and only reads itself. It writes one gradient for each tensor that
it takes from outside; two that are equal (both terms of a sum) are one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from costmodel.memory.block.backward_facts import (
    BackwardFacts,
    InputGradient,
    OpFacts,
    backward_facts,
)
from costmodel.memory.saved import SavedTensors, StorageMap
from costmodel.table.fusion import fused_kernels
from planner.language.graph import Program, Ref
from planner.language.ops.call import ProductArgs
from planner.language.ops.record import family_of


class MadeLate(NamedTuple):
    """What a compiled backward makes again, and not before its first kernel."""

    inside: frozenset[str]
    """Storages that only kernels read: each makes them itself."""
    factors: Mapping[str, str]
    """Storages that but for kernels only weight gradients read, and the op that makes each: it is
    written by the kernel of that op's backward, which reads the same."""


def made_late(saved: SavedTensors, products: Collection[str], again: Collection[str]) -> MadeLate:
    """Return what the backward of a program makes late of the ops named in `again`."""
    storage = saved.storages.storage
    kernels = {op.name for ops in fused_kernels(saved.program, saved.storages.views) for op in ops}
    makers = {name: op.name for op in saved.program.ops for name in op.outputs}
    readers: defaultdict[str, set[str]] = defaultdict(set)
    for op, mine in saved.saved.items():
        for name in mine.tensors:
            readers[storage[name].root].add(op)
    late = {
        root: readers[root] - kernels
        for root in saved.roots
        if makers.get(root) in again and readers[root] <= kernels.union(products)
    }
    # What is made again for others is made early, and on the way to it all that kernels read, too:
    # no kernel makes that twice.
    early = [root for root in saved.roots if makers.get(root) in again and root not in late]
    inputs = {op.name: op.inputs for op in saved.program.ops if op.name in again}
    met: set[str] = set()
    while early:
        for name in inputs.get(makers.get(early.pop(), ""), ()):
            root = storage[name].root
            if root not in met:
                met.add(root)
                early.append(root)
    late = {root: others for root, others in late.items() if root not in met}
    return MadeLate(
        inside=frozenset(root for root, others in late.items() if not others),
        factors={root: makers[root] for root, others in late.items() if others},
    )


def compiled_facts(
    saved: SavedTensors,
    products: Mapping[str, ProductArgs],
    again: Collection[str],
    kept: Mapping[str, int],
    waits: Mapping[str, tuple[str, ...]] | None = None,
) -> BackwardFacts:
    """Return the facts of a compiled program whose backward runs the ops named in `again` again;
    `kept` has the bytes of the storages that it keeps, `waits` the `products_beside` its
    collectives.
    """
    facts = backward_facts(saved, products, waits=waits, is_compiled=True)
    # Storages that only these ops read are freed by the kernel in which the first of them runs.
    read: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for root in kept.keys() - facts.saved.keys():
        readers = [
            op.name
            for op in saved.program.ops
            if op.name in again
            for name in op.inputs
            if saved.storages.storage[name].root == root
        ]
        read[readers[0]].append((root, kept[root]))
    inside, factors = made_late(saved, products, again)
    remade: defaultdict[str, int] = defaultdict(int)
    for root, maker in factors.items():
        remade[maker] += facts.saved[root]
    steps = fused_steps(
        [
            step._replace(
                saved=(
                    *(each for each in step.saved if each[0] not in inside),
                    *read[step.op.name],
                ),
                remade_bytes=remade[step.op.name],
            )
            for step in facts.ops
        ],
        saved.storages,
        again,
    )
    return replace(
        facts,
        ops=steps,
        saved={root: size for root, size in facts.saved.items() if root not in inside},
        saved_bytes=facts.saved_bytes
        + sum(size for each in read.values() for _, size in each)
        - sum(facts.saved[root] for root in inside.union(factors)),
        readers={name: step.op.name for step in steps for name in step.op.inputs},
    )


def fused_steps(
    steps: Sequence[OpFacts], storages: StorageMap, again: Collection[str] = ()
) -> tuple[OpFacts, ...]:
    """Return the steps of a program's backward, last op first, with those of each kernel as one;
    ops named in `again` run again.

    A kernel runs when the first of its ops would, or ahead of an op that takes a gradient of it:
    between two of a kernel's ops stand others, which make what it takes.
    """
    program = storages.program
    kernels = {op.name: ops for ops in fused_kernels(program, storages.views) for op in ops}
    readers: defaultdict[str, list[str]] = defaultdict(list)
    for op in program.ops:
        for name in op.inputs:
            readers[name].append(op.name)
    step_of = {step.op.name: step for step in steps}
    # A view that is made again costs nothing.
    again = {op.name for op in program.ops if op.name in again} - {
        op.name for op in program.ops if storages.views.issuperset(op.outputs)
    }
    found: list[OpFacts] = []
    run: set[str] = set()

    def run_with(step: OpFacts) -> None:
        """Run an op's backward, or that of its kernel, behind those that make what it takes."""
        if step.op.name in run:
            return
        ops = kernels.get(step.op.name, (step.op,))
        run.update(op.name for op in ops)
        for reader in (r for op in ops for name in op.outputs for r in readers[name]):
            run_with(step_of[reader])
        if step.op.name in kernels:
            found.append(_kernel_step([step_of[op.name] for op in reversed(ops)], program, again))
        else:
            found.append(step)

    for step in steps:
        ops = kernels.get(step.op.name)
        if ops is None or step.op is ops[0]:
            run_with(step)
    return tuple(found)


def _kernel_step(parts: Sequence[OpFacts], program: Program, again: Collection[str]) -> OpFacts:
    """Return one step of the steps of a kernel's ops, last op first."""
    names = {part.op.name for part in parts}
    made = dict.fromkeys(name for part in parts for name in part.op.outputs)
    outer = {name for op in program.ops if op.name not in names for name in op.inputs}
    arriving = tuple(name for name in made if name in outer or name in program.outputs)
    sources: defaultdict[str, list[str]] = defaultdict(list)
    """By tensor: what each gradient of it is, a tensor whose gradient is handed on, or "" if made.
    """
    for name in arriving:
        sources[name].append(name)
    for part in parts:
        for gradient in part.gradients:
            # A transposed gradient is written in rows, for the product that takes it.
            is_same = gradient.is_same and family_of(part.op.target).dim_order is None
            sources[gradient.name].append(part.op.outputs[0] if is_same else "")
    gradients: dict[str, InputGradient] = {}
    first_with: dict[str, str] = {}
    for gradient in (each for part in parts for each in part.gradients):
        if gradient.name in made or gradient.name in gradients:
            continue
        if gradient.is_param:
            gradients[gradient.name] = gradient
            continue
        origin = _origin(gradient.name, sources)
        # Of equal gradients that are made here the first has the memory: what arrives, too, where
        # another is added to it.
        source = "" if origin == gradient.name else origin
        if source and (source not in arriving or len(sources[source]) > 1):
            source = first_with.setdefault(origin, gradient.name)
            source = "" if source == gradient.name else source
        gradients[gradient.name] = gradient._replace(
            is_same=bool(source), has_gaps=False, source=source
        )
    inputs = dict.fromkeys(n for part in reversed(parts) for n in part.op.inputs if n not in made)
    return OpFacts(
        op=replace(parts[-1].op, args=tuple(map(Ref, inputs)), kwargs=(), outputs=arriving),
        gradients=tuple(gradients.values()),
        scratch_bytes=0,
        deferred_scratch_bytes=0,
        ahead_bytes=0,
        deferred_ahead_bytes=0,
        saved=tuple(each for part in parts for each in part.saved),
        extra_bytes=sum(part.extra_bytes for part in parts),
        product=None,
        remade_bytes=sum(part.remade_bytes for part in parts),
        is_kernel=True,
        sums_late=not names.isdisjoint(again) and any(_sums(part, program) for part in parts),
    )


def _sums(part: OpFacts, program: Program) -> bool:
    """Whether an op's backward sums a gradient over entries that share it: a weight's."""
    made = prod(program.tensor[part.op.outputs[0]].shape_at(1))
    return any(
        not gradient.is_same and prod(program.tensor[gradient.name].shape_at(1)) < made
        for gradient in part.gradients
    )


def _origin(name: str, sources: Mapping[str, list[str]]) -> str:
    """Return the tensor whose gradient that of `name` is: one that arrives, one made inside, or
    itself.
    """
    while True:
        mine = sources[name]
        if len(mine) != 1 or not mine[0] or mine[0] == name:
            return name
        name = mine[0]
