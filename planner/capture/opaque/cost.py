"""What a module does when it runs as it is: counted while it runs on random values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planner.capture.modes.ledger import Ledger
from planner.language.graph import Affine

Counts = tuple[Affine, Affine, Affine, int, Affine]
"""Of one pass: flop, bytes read, bytes written, kernels, scratch bytes; per sample, but kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the forward and the backward of a call take.

    `Counts` of each. All but the number of kernels are taken to grow with the samples.
    """

    forward: Counts
    backward: Counts


def dearest(costs: Sequence[Cost]) -> Cost:
    """Return the one with the most flop in its forward and backward: values may leave work out."""
    return max(costs, key=lambda cost: cost.forward[0].per_sample + cost.backward[0].per_sample)


def counted(run: Callable[[], Any], num_samples: int, kept_bytes: Callable[[Any], int]) -> Counts:
    """Run something and count its work; `kept_bytes` are those of its result that no scratch is."""
    kernels, ledger = _Kernels(), Ledger(is_dry=False, copies_to_reduce=False)
    with ledger.watching(), kernels:
        made = run()
    scratch = max(0, ledger.peak_bytes - kept_bytes(made))

    def each(count: int) -> Affine:
        # Per sample, rounded up; kernels alone do not grow with the batch.
        return Affine(-(-count // num_samples), 0)

    return (
        each(kernels.flop),
        each(kernels.read_bytes),
        each(kernels.written_bytes),
        kernels.count,
        each(scratch),
    )


class _Kernels(TorchDispatchMode):
    """Counts ops that are no views, the bytes of what they read and write, and their flop: those of
    products by PyTorch's own formulas, of others one for each entry made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.flop = self.read_bytes = self.written_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        new = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        if not _is_view(func):
            self.count += 1
            self.read_bytes += sum(map(_bytes, given))
            self.written_bytes += sum(map(_bytes, new))
            formula = flop_registry.get(func._overloadpacket)
            self.flop += (
                sum(leaf.numel() for leaf in new)
                if formula is None
                else formula(*args, **(kwargs or {}), out_val=made)
            )
        return made


def _is_view(func: Any) -> bool:
    """Whether an op returns what shares memory with its input, and writes nothing."""
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
