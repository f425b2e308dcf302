"""What a model's state dict has beside what stages train: kept whole on every rank, on the CPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.capture.outside import distinct, kept_outside, stored_tensors
from planner.runtime.state.weights import empty_tensors


@dataclass(frozen=True, kw_only=True)
class OutsideTensors:
    """Tensors of a model by the user's names, as far as no stage alone holds them.

    Attributes:
        unused: what no block uses, so that no step changes it.
        also_read: buffers that stages hold, cut or elsewhere, and that are read whole beside them.
        empty: names of the tensors that came on the meta device, so without first values.
        dtypes: the user's dtype of each tensor of the state dict.
    """

    unused: dict[str, Tensor]
    also_read: dict[str, Tensor]
    empty: frozenset[str]
    dtypes: dict[str, torch.dtype]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        held: Collection[str],
        read: Collection[str],
        may_be_empty: bool,
        makes_buffers: bool,
    ) -> OutsideTensors:
        """Return those of a model of which stages hold `held`, and preambles or counts of labels
        read `read`, by the user's names.

        Where the start `makes_buffers`, a buffer on the meta device gets its value like any other:
        files need not have it.
        """
        empty = empty_tensors(model) if may_be_empty else frozenset[str]()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        if makes_buffers:
            empty -= buffers.keys()
        # A buffer beside the state dict keeps the model's values, unless it came without.
        lacking = {
            name: buffer for name, buffer in model.named_buffers() if name in empty and name in read
        }
        stored = stored_tensors(model)
        kept = kept_outside(lacking | stored, held=held, read=read)
        copies = {id(t): torch.empty_like(t, device="cpu") for t in distinct(kept)}
        outside = {name: copies[id(tensor)] for name, tensor in kept.items()}
        return cls(
            unused={name: tensor for name, tensor in outside.items() if name not in held},
            also_read={name: tensor for name, tensor in outside.items() if name in held},
            empty=empty,
            dtypes={name: tensor.dtype for name, tensor in stored.items()},
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return self.unused | self.also_read
