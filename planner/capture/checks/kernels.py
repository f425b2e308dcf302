"""Calls that meta kernels let pass and real kernels refuse: dtypes, and memory written to twice.

Meta kernels tell shapes, and check less than real ones do. A model that was captured by them alone
would fail in its first step, in a plan as in one process. So each kind of call that may be refused
is made once for real, on a few zeros: with the dtypes that it has, and where it writes in place,
with strides of no step where the tensor has them; fake tensors, which have a view of any shape,
are viewed as real ones are. Errors of another kind (sizes, which are cut
down here; values, which are not those of the model) say nothing and are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from planner.capture.checks.stays_on_meta import OnMeta
from planner.capture.diagnose import calling_line, first_line
from planner.errors import CaptureError

_MOST = 16
"""Sizes above it are cut down to it: kernels look at dtypes first, and at each size alike."""

_REFUSED = re.compile(
    r"dtype|scalar type|not implemented for '|data type|can't be cast|single memory location"
    r"|should be the same"
)
_OF_A_DEVICE = re.compile(
    r"not implemented for '(\w*Half|BFloat|Float8|Float4|UInt\d|Q|Bits)|_cpu_?\" not implemented"
)
"""Types that kernels of one device have and those of another do not, and kernels of a CPU's own:
`histc` counts whole numbers on CUDA alone, and models ask which device they are on."""


class Kernels:
    """Makes each kind of call once. Mutable: it grows with each that is unlike those before."""

    def __init__(self, made: OnMeta) -> None:
        self._made = made
        self._tried: set[Hashable] = set()

    def refuse_failing(self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> None:
        """Raise CaptureError with the user's line where a real kernel would refuse this call.

        `leaves` are those of `args` and `kwargs`.
        """
        if not isinstance(func, OpOverload) or func.namespace != "aten" or func.is_view:
            if func is torch.ops.aten.view.default and isinstance(args[0], FakeTensor):
                _view_as_real(args[0], args[1])
            return
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        dtypes = tuple(tensor.dtype for tensor in tensors)
        # (A call is as its schema has it: what is written comes first.)
        overlaps = func._schema.is_mutable and bool(tensors) and _overlaps(tensors[0])
        is_plain = len(set(dtypes)) == 1 and dtypes[0].is_floating_point
        if not dtypes or (is_plain and not overlaps):
            return
        kind = func, dtypes, overlaps
        if kind in self._tried or self._made.autocasts:
            return
        self._tried.add(kind)
        error = _error_of(func, args, kwargs)
        if error and _REFUSED.search(error) and not _OF_A_DEVICE.search(error):
            raise CaptureError(f"the model fails in one process, too{calling_line()}: {error}")


def _view_as_real(tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise RuntimeError where a tensor's strides have no view of this shape; fake ones have."""
    with _disable_current_modes():
        torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(shape)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor lie in one place, as those that `expand` makes do."""
    return any(
        size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _error_of(func: OpOverload, args: Any, kwargs: Any) -> str:
    """Return what a real kernel says of a call; nothing where it takes it."""
    with _disable_current_modes(), torch.no_grad():
        given = tree_map(_small, (args, kwargs))
        try:
            func(*given[0], **given[1])
        except Exception as error:
            return first_line(error)
    return ""


def _small(leaf: Any) -> Any:
    """Return a real tensor of zeros for a tensor, with repeated elements where it has some; a size
    for a size, and else what was given.
    """
    if isinstance(leaf, Tensor):
        # Of a repeated dim there is one element, which is then seen as many.
        shape = [min(size, _MOST) for size in leaf.shape]
        kept = [
            size if step else min(size, 1) for size, step in zip(shape, leaf.stride(), strict=True)
        ]
        return torch.zeros(kept, dtype=leaf.dtype).expand(shape)
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    return min(leaf, _MOST) if type(leaf) is int else leaf
