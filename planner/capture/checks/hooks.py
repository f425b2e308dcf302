"""What hangs on a module and would be lost by a graph: refused before anything is captured.

A captured graph holds what a forward computes. A hook on a gradient is no part of that, and
neither is memory that two parameters share: an update of either changes both; nor a tensor without
strides (sparse, nested). Hooks on the forward are: they run while the model is captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from planner.capture.diagnose import calling_line
from planner.errors import CaptureError

HOOK_ADVICE = (
    "no plan can run it; put what it does into the forward, into a torch.autograd.Function, or "
    "into the optimizer's param groups"
)


def refuse_lost(module: nn.Module) -> None:
    """Raise CaptureError, in one line, for the first thing that a graph would lose."""
    for what, hooks in _hooks_of(module):
        for hook in hooks:
            raise CaptureError(f"{what} has a hook on its gradient{_defined(hook)}; {HOOK_ADVICE}")
    for name, tensor in module.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(
                f"parameter {name} has no shape yet (a lazy module); run one batch through the "
                "model in model() before returning it, or give the sizes"
            )
    for what, held in _held(module):
        layout = str(held.layout).removeprefix("torch.")
        if held.is_nested:
            raise CaptureError(
                f"{what} is a nested tensor, which no graph holds; keep one tensor filled up to "
                "the longest, with lengths or a mask in a buffer beside it"
            )
        if held.is_quantized:
            raise CaptureError(
                f"{what} is a quantized tensor, which no graph holds; keep it as it was before "
                "(x.dequantize()), or its whole numbers and their scale as two buffers"
            )
        if layout != "strided":
            raise CaptureError(
                f"{what} is a {layout} tensor of shape {list(held.shape)}, which no graph holds; "
                "keep it dense (x.to_dense()), or as two buffers, its indices and its values, "
                "which forward gathers by and adds up (index_add)"
            )
    shared = _sharing_memory(module)
    if shared is not None:
        raise CaptureError(
            f"parameter {shared[0]} and {shared[1]} are two tensors in the same memory, so that "
            "training either changes both; tie them by assigning the parameter itself "
            "(b.weight = a.weight), or clone one"
        )


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module holds, by what and how they are called."""
    yield from ((f"parameter {name}", tensor) for name, tensor in module.named_parameters())
    yield from ((f"buffer {name}", tensor) for name, tensor in module.named_buffers())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"attribute {path}.{name}" if path else f"attribute {name}", value


def _hooks_of(module: nn.Module) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield what can have hooks that a graph loses, with those it has."""
    everywhere = {
        **torch_module._global_backward_hooks,
        **torch_module._global_backward_pre_hooks,
    }
    yield "every module (register_module_full_backward_hook)", everywhere.values()
    for name, part in module.named_modules():
        hooks = {**part._backward_pre_hooks, **part._backward_hooks}
        yield f"module {name or 'model()'} ({type(part).__name__})", hooks.values()
    for name, param in module.named_parameters():
        yield f"parameter {name}", tensor_hooks(param)


def tensor_hooks(tensor: Tensor) -> list[Any]:
    """Return the hooks on a tensor's gradient."""
    kinds: tuple[Mapping[int, Any] | None, ...] = (
        tensor._backward_hooks,
        getattr(tensor, "_post_accumulate_grad_hooks", None),
    )
    return [hook for hooks in kinds for hook in (hooks or {}).values()]


def _defined(hook: Any) -> str:
    """Return where a hook's code stands, if that is known."""
    code = getattr(inspect.unwrap(hook), "__code__", None) if callable(hook) else None
    return f" (defined at {code.co_filename}:{code.co_firstlineno})" if code else ""


@contextmanager
def saved_tensors_untouched() -> Iterator[None]:
    """Refuse forwards inside that change what autograd saves; torch's own ways of saving less
    (checkpointing, saving on the CPU) change no number.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def refusing(self: torch.autograd.graph.saved_tensors_hooks) -> None:
        if not getattr(self.unpack_hook, "__module__", "").startswith("torch."):
            raise CaptureError(
                f"forward changes what autograd saves (saved_tensors_hooks){calling_line()}; leave "
                "it out: what is kept, recomputed or offloaded is the plan's choice"
            )
        enter(self)

    hooks.__enter__ = refusing  # type: ignore[method-assign]
    try:
        yield
    finally:
        hooks.__enter__ = enter  # type: ignore[method-assign]


def _sharing_memory(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of a parameter and of another tensor whose memory overlaps."""
    held: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        held.setdefault(id(tensor), (name, tensor))
    spans: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, tensor in held.values():
        if type(tensor.data) is not Tensor or tensor.layout != torch.strided or not tensor.numel():
            continue
        # Overlap is by bytes: parts of one flat buffer, side by side, are independent tensors.
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.element_size()
        end = start + (reach + 1) * tensor.element_size()
        is_param = isinstance(tensor, nn.Parameter)
        known = spans.setdefault(tensor.untyped_storage()._cdata, [])
        for other_start, other_end, other, other_is_param in known:
            if start < other_end and other_start < end and (is_param or other_is_param):
                return (other, name) if other_is_param else (name, other)
        known.append((start, end, name, is_param))
    return None
