"""Graphs of ATen calls through the compiler; its cache on disk has those of runs before."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from planner.runtime.stage.calls.losses.chunk_loops import LOOPS

Kernels = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes a list, which it may empty: what nobody else holds is freed as soon as it is used."""

Compiler = Callable[[fx.GraphModule], Kernels]
"""Makes kernels of a graph."""


class CompilerFailed(Exception):
    """The compiler of this machine failed; the message says how, as a clause."""


def compiled(module: fx.GraphModule) -> Kernels:
    """Return a graph's kernels, on the sizes that it was traced with.

    Raises CompilerFailed where this machine has no compiler, or it takes not this graph.
    """
    from torch._inductor import config, standalone_compile

    from planner.capture.diagnose import first_line

    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    settings = {
        # The generators of eager ops: recomputation restores them, and replicas share their states.
        "fallback_random": True,
        # Ranks that run this block eagerly (on a batch of another size) meet those that do not in
        # collectives, which keep the program's order.
        "reorder_for_locality": False,
    }
    try:
        with torch.no_grad(), warnings.catch_warnings(), config.patch(settings):
            warnings.simplefilter("ignore")  # the compiler's own
            artifact: Any = standalone_compile(module, inputs, dynamic_shapes="from_graph")
    except Exception as error:
        raise CompilerFailed(first_line(error)) from error
    call = artifact._compiled_fn
    return _taking_a_list(call) or (lambda tensors: call(*tensors))


def _taking_a_list(call: Any) -> Kernels | None:
    """Return what a compiled function wraps that takes its arguments in a list (torch 2.13,
    _functorch/aot_autograd.py): the wrapper holds them until it has ended.
    """
    while call is not None:
        code = getattr(call, "__code__", None)
        if code is not None and code.co_argcount == 1 and not code.co_flags & inspect.CO_VARARGS:
            kernels: Kernels = call
            return kernels
        call = getattr(call, "__wrapped__", None)
    return None


def op_by_op(module: fx.GraphModule) -> Kernels:
    """Return the same without a compiler: what dry runs count the bytes of."""

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        interpreter = _OpByOp(module)
        made: Sequence[Tensor] = interpreter.boxed_run(tensors)
        return made

    return run


class _OpByOp(fx.Interpreter):
    """Runs a graph; of loops that it has as an op the ops inside, which dry runs see."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(LOOPS.get(target, target), args, kwargs)
