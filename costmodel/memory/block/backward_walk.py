"""The backward of a program, op by op: its highest point, what it makes and what it defers.

Weight gradients that are made beside a collective (`facts.waits`) keep what they are made of until
then, and are made while the collective's result is there already (`Waiting`).

A gradient is freed once the op that made its tensor has run backward; what autograd saved is
freed by the earliest op that saved it. How gradients share buffers is in
`costmodel.memory.block.gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from costmodel.memory.block.backward_facts import (
    AT_END,
    BackwardFacts,
    InputGradient,
    Product,
)
from costmodel.memory.block.deferred_weights import DeferredWeight
from costmodel.memory.block.gradients import Gradients, seen_through
from costmodel.memory.block.placed_block import BackwardWalk, Given
from costmodel.memory.block.waiting_weights import Waiting
from planner.language.graph import Op
from planner.language.ops.kernel import LARGE_BYTES


def backward_walk(
    facts: BackwardFacts,
    *,
    first: bool,
    held: frozenset[str] = frozenset(),
    leaves: frozenset[str] = frozenset(),
    split: bool = False,
    gradient_factor: int = 1,
    waiting: frozenset[str] = frozenset(),
    adds_products: bool = True,
    kept_by_others: frozenset[str] = frozenset(),
    freed_inputs: frozenset[str] = frozenset(),
    started: frozenset[str] = frozenset(),
) -> BackwardWalk:
    """Run a program's backward.

    first: parameters have no gradients yet, so those made stay, `gradient_factor` times as large
        as the parameters. In later microbatches they are added to those and freed. Products with
        a weight of at least LARGE_BYTES accumulate in place (a GEMM with beta = 1, no temporary
        gradient) if the sum has the product's dtype and `adds_products`.
    held: outputs, and inputs started, whose gradients another holder has too.
    leaves: inputs that keep their gradients, in buffers of their own.
    split: weight gradients are deferred.
    waiting: parameters whose gradients stay to the end of the program, first or not.
    kept_by_others: outputs that another block, stage or message keeps alive.
    freed_inputs: inputs that no other block keeps alive.
    started: inputs that have a gradient of later blocks already.
    """
    program, storage, results = facts.storages.program, facts.storages.storage, facts.results
    grads = Gradients()
    for name, size in facts.outputs.items():
        grads.allocate(name, size)
    # A gradient that is only handed through to an input keeps its buffer: the stage must not
    # count that twice, so each buffer that arrived is noted with the output it is of.
    given_by = {grads.buffer_of(name)[0]: name for name in grads.of}
    for name in started:
        grads.allocate(name, program.tensor[name].bytes_at(1))
    for name in held:
        grads.hold(name)
    live_saved = facts.saved_bytes
    # The rise counts from here: all that was saved, and the gradients that arrived.
    start = live_saved + grads.live
    # What a neighbour still holds outlives the op that would free it.
    never_freed = {storage[name].root for name in program.inputs if name not in freed_inputs}
    never_freed |= {storage[name].root for name in kept_by_others}
    # Deferred, those at the end of a compiled block go to the later job as well.
    left = {AT_END} if facts.is_compiled and split else set()
    late = Waiting({name: each for name, each in facts.waits.items() if name not in left})
    if split:
        # A deferred weight gradient reads its operands in a later job.
        never_freed.update(
            *(
                step.product.never_freed
                for step in facts.ops
                if step.product and step.op.name not in late.products
            )
        )
    laid = dict(facts.strides)
    param_grads: dict[str, int] = {}
    stay_bytes = 0  # of gradients of parameters, and of inputs copied to rows
    reached: set[str] = set()
    deferred: list[DeferredWeight] = []
    peak = start
    for step in facts.ops:
        op = step.op
        live_saved += step.remade_bytes
        arriving = [name for name in op.outputs if name in grads.of]
        made: Sequence[InputGradient] = ()
        if arriving:
            made, scratch, product = step.gradients, step.scratch_bytes, None
            ahead = step.ahead_bytes
            # (Those that wait for a collective are made there, whatever else is deferred.)
            is_late = split or op.name in late.products
            if is_late and step.product is not None:
                product, scratch = step.product, step.deferred_scratch_bytes
                ahead = step.deferred_ahead_bytes
                made = [gradient for gradient in made if gradient.name not in product.inputs]
            peak = max(peak, live_saved + grads.live + stay_bytes + ahead)
            if step.is_kernel:
                scratch -= _written_over(arriving, made, grads)
            # While an op runs backward, three things are alive together: the arriving gradients,
            # those it makes, and its kernel's scratch.
            for name, size, is_param, is_weight, is_same, has_gaps, strides, source in made:
                reached.add(name)
                if not is_param and source and is_same and source in grads.of:
                    grads.share(name, source)
                    laid.setdefault(name, strides)
                    continue
                if not is_param:
                    # A view's backward is a view of the arriving gradient, if strides allow it.
                    seen = laid.get(arriving[0]) if is_same and not source else None
                    through = None if seen is None else seen_through(op, name, program, seen)
                    if through is not None:
                        grads.share(name, arriving[0], gaps=has_gaps)
                    else:
                        grads.allocate(name, size)
                    laid.setdefault(name, through or strides)
                    continue
                adds = is_weight and adds_products and gradient_factor == 1
                in_place = adds and size >= LARGE_BYTES
                stays = name in waiting or facts.is_compiled
                if stays or first:
                    # A gradient that waits for the end of the program is not summed in fp32 yet.
                    factor = 1 if stays else gradient_factor
                    # Two ops that use a parameter add to one gradient: the second makes no other
                    # buffer.
                    before = param_grads.get(name, 0)
                    stay_bytes += factor * size - before
                    param_grads[name] = factor * size
                    # The product's own result lives until it is cast to the dtype of the sum, or
                    # added to that of another op of the block (a table that is read twice).
                    apart = factor > 1 or (before > 0 and not in_place)
                    scratch += size if apart and not is_same else 0
                else:
                    # Added to the sum of earlier microbatches at once, it lives as long as its op.
                    scratch += 0 if is_same or in_place else size
            peak = max(peak, live_saved + grads.live + stay_bytes + scratch)
            if op.name in facts.waits:
                # The collective is under way: what it takes, copies that are laid out for it, and
                # what it gives are all there.
                rise, more = late.make(
                    grads,
                    first=first,
                    gradient_factor=gradient_factor,
                    waiting=waiting,
                    made=param_grads,
                )
                peak = max(peak, live_saved + grads.live + stay_bytes + scratch + rise)
                stay_bytes += more - late.rows_bytes
                reached |= late.params
                live_saved -= late.release(grads)
            if product is not None:
                weight = _defer(op, product, grads, given_by)
                if op.name in late.products:
                    trained = (g.name for g in step.gradients if g.name in product.inputs)
                    late.add(op, product, weight, trained)
                else:
                    deferred.append(weight)
                if product.rows_bytes is not None:
                    stay_bytes += product.rows_bytes
                    peak = max(peak, live_saved + grads.live + stay_bytes)
            elif not step.sums_late:
                for name in arriving:
                    grads.free(name)
        # Autograd frees what an op saved once its backward has run. What the call of a recomputed
        # block refers to lives until nothing is left of the block's graph.
        live_saved -= step.extra_bytes + late.freed(
            (root, size)
            for root, size in step.saved
            if root not in never_freed and root not in results and not step.sums_late
        )
        if op.name == facts.first_saver:
            # The first op that saved runs backward last. With it goes the block's graph, and the
            # results that its call kept for the second run.
            live_saved -= late.freed(
                (root, facts.saved.get(root, 0)) for root in results - never_freed
            )
        # The engine frees what a node saved before it adds the node's gradients to others, so the
        # sums below are not alive beside the kernel's scratch.
        beside = live_saved + stay_bytes
        for gradient in made:
            name, size = gradient.name, gradient.num_bytes
            if name not in grads.of:
                continue
            before = grads.live
            peak = max(peak, beside + before + grads.add_up(name, size))
            if name in leaves and facts.readers[name] == op.name and not grads.is_own(name):
                # With the first reader's gradient the leaf's sum is complete. Its `.grad` must be
                # its own: AccumulateGrad copies a shared buffer.
                peak = max(peak, beside + grads.live + size)
                grads.copy(name, size)
    if AT_END in late.waits:
        rise, _ = late.make(
            grads, first=first, gradient_factor=gradient_factor, waiting=waiting, made=param_grads
        )
        peak = max(peak, live_saved + grads.live + stay_bytes + rise)
        reached |= late.params
    given = {}
    for name in program.inputs:
        if name in reached:
            buffer, size = grads.buffer_of(name)
            given[name] = Given(size, given_by.get(buffer), name in grads.gaps, name in started)
    params = frozenset(name for name in reached if program.tensor[name].kind == "param")
    return BackwardWalk(peak - start, params, tuple(deferred), given)


def _written_over(arriving: Sequence[str], made: Sequence[InputGradient], grads: Gradients) -> int:
    """Return the bytes of an arriving gradient that a fused kernel writes over: where it makes one
    gradient of that size, and no other kernel nor a product needs it.
    """
    written = [each.num_bytes for each in made if not each.is_param and not each.source]
    sizes = (grads.buffer_of(name)[1] for name in arriving if grads.is_own(name))
    return written[0] if len(written) == 1 and written[0] in sizes else 0


def _defer(
    op: Op, product: Product, grads: Gradients, given_by: Mapping[int, str]
) -> DeferredWeight:
    """Return a product's weight gradient with all that it refers to until it is computed."""
    buffer, size = grads.buffer_of(op.outputs[0])
    held = product.weight.held
    # The copy of the input in rows is fresh memory, which no other product shares.
    if product.rows_bytes is not None:
        held += ((f"rows of {op.name}", product.rows_bytes),)
    held += ((f"gradient {given_by.get(buffer, buffer)}", size),)
    return product.weight._replace(held=held)
