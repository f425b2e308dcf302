"""A compiled block as autograd sees it: one node, which saves what its ops would have saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.runtime.stage.compiled.graphs import Capture, GraphedKernels, Standing
from planner.runtime.stage.compiled.halves import Halves
from planner.runtime.stage.compiled.kernels import Compiler, Kernels
from planner.runtime.stage.compiled.pieces import RunPieces, in_pieces
from planner.runtime.stage.weight_grads import Pending, WeightQueue, weight_gradient


class CompiledBlock:
    """What a stage calls instead of a class's eager program, with the same tensors."""

    def __init__(
        self,
        halves: Halves,
        compiler: Compiler,
        *,
        eager: Callable[..., tuple[Tensor, ...]],
        queue: WeightQueue | None,
        beside: bool = False,
    ) -> None:
        """`eager` runs where nothing is saved (an evaluation), and where ops are looked at one by
        one (anomaly mode); `queue` is where the stage's weight gradients wait for W jobs, if they
        do. `beside`: weight gradients are made beside collectives of the backward.
        """
        self.halves, self.queue, self._eager = halves, queue, eager
        self.forward: Kernels = compiler(halves.forward)
        self.backward: Kernels | None = None
        self.pieces: RunPieces | None = None
        if halves.backward is None:
            return
        factors = [(x_at, grad_at) for *_, x_at, grad_at in halves.products]
        gradients = {at for at in halves.gradients if at is not None}
        found = in_pieces(halves.backward, factors, gradients) if beside else None
        if found is None:
            self.backward = compiler(halves.backward)
        else:
            self.pieces = RunPieces(found, compiler)

    def run_in_graphs(
        self, capture: Capture, *, params: Collection[int], num_blocks: int, standing: Standing
    ) -> None:
        """Run both halves in CUDA graphs from now on; `params` are the positions of parameters,
        which so many blocks have of their own. `standing` is that of the class, of all sizes.
        """
        graphed = partial(GraphedKernels, num_blocks=num_blocks, capture=capture, standing=standing)
        saved = self.halves.saved_tensors
        self.forward = graphed(self.forward, params=sorted(params), half="forward")
        if self.backward is not None:
            of_backward = [at for at, position in enumerate(saved) if position in params]
            self.backward = graphed(self.backward, params=of_backward, half="backward")

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the block on inputs and params."""
        looked_at = torch.is_anomaly_enabled()
        if (
            looked_at
            or not torch.is_grad_enabled()
            or any(
                x.requires_grad and not needs
                for x, needs in zip(tensors, self.halves.needs, strict=True)
            )
        ):
            return self._eager(*tensors)
        # Kernels are made for one order in memory.
        given = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        if self.halves.backward is None:
            with torch.no_grad():
                made = self.forward(given)
            return tuple(made[at] for at in self.halves.outputs)
        pending = None if self.queue is None else self.queue.current
        outputs: tuple[Tensor, ...] = _Block.apply(self, pending, *given)
        return outputs


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block: CompiledBlock, pending: list[Pending] | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        halves = block.halves
        made = block.forward(list(tensors))
        outputs = tuple(made[at] for at in halves.outputs)
        ctx.block, ctx.pending = block, pending
        # Apart from what is saved, which may come back detached from where its gradient is.
        ctx.weights = [tensors[at] for at, *_ in halves.products] if block.queue else None
        ctx.save_for_backward(
            *(tensors[at] for at in halves.saved_tensors), *(made[at] for at in halves.saved_made)
        )
        ctx.mark_non_differentiable(
            *(x for x, has in zip(outputs, halves.has_gradient, strict=True) if not has)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        block: CompiledBlock = ctx.block
        halves, pending, weights = block.halves, ctx.pending, ctx.weights
        taken = list(ctx.saved_tensors)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # Nodes outlive what they saved: to the end of their stage's backward. Without this
            # hold each saved tensor goes with the kernel that reads it last.
            ctx.maybe_clear_saved_tensors()
            ctx.pending = ctx.weights = None
        taken += [g.contiguous() for g, has in zip(grads, halves.has_gradient, strict=True) if has]
        needs = ctx.needs_input_grad[2:]
        fresh: list[tuple[int, Tensor]] = []  # (position, gradient) that autograd hands on
        left = list(range(len(halves.products)))

        def products_of(indices: Iterable[int], made: Sequence[Tensor | None]) -> list[Pending]:
            """Return those that are added to sums; the others are made."""
            found = []
            for index in indices:
                position, transposed, scaling, x_at, grad_at = halves.products[index]
                x, grad = made[x_at], made[grad_at]
                assert x is not None
                assert grad is not None
                if not needs[position]:
                    continue
                weight = None if weights is None else weights[index]
                if weight is not None and weight.is_leaf and not weight._backward_hooks:
                    found.append(Pending(weight, None, transposed, x, grad, scaling))
                    continue
                # Autograd hands it to FSDP2, to what the weight was made from, or to the hook.
                of = weight_gradient(None, x, grad, transposed=transposed, scaling=scaling)
                assert of is not None
                fresh.append((position, of))
            return found

        def make_beside(indices: Sequence[int], made: Sequence[Tensor | None]) -> None:
            for index in indices:
                left.remove(index)
            now = products_of(indices, made)
            while now:  # the last one first, as at the end
                now.pop().accumulate()

        made: list[Tensor | None]
        if block.pieces is not None:
            made = block.pieces(taken, make_beside)
        else:
            assert block.backward is not None
            made = list(block.backward(taken))
        found = [None if at is None else made[at] for at in halves.gradients]
        now = products_of(left, made)
        if pending is not None:
            pending += now
            now = []
        for position, each in fresh:
            before = found[position]
            found[position] = each if before is None else before + each
        # Each product gives its factors back as it is made.
        made = []
        while now:
            now.pop().accumulate()
        return (None, None, *found)
