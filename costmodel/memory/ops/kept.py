"""What one op keeps for its backward, and what the rules that tell it look at."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.memory.ops.storage import StorageMap
from planner.graph import Program
from planner.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one op keeps: tensors by name, and bytes of storages no tensor of the program has
    (statistics, masks, private copies).
    """

    tensors: tuple[str, ...] = ()
    extra_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Context:
    """The program around an op; `aside` names products whose weight gradients are put aside."""

    program: Program
    storages: StorageMap
    device_type: str
    aside: frozenset[str]

    def needs_grad(self, name: str) -> bool:
        """Whether a tensor needs a gradient."""
        return self.program.tensor[name].requires_grad

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor's dims."""
        return self.program.tensor[name].shape_at(1)

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.program.tensor[name].bytes_at(1)

    def stat_bytes(self, name: str) -> int:
        """Bytes of one statistic of this tensor: GPU kernels keep them in fp32."""
        dtype = self.program.tensor[name].dtype
        return DTYPE_BYTES[dtype] if self.device_type == "cpu" else max(4, DTYPE_BYTES[dtype])
