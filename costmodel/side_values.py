"""Values that no block makes: those made of the batch for each microbatch, and those made once.

The preamble makes both. A value that depends on no batch input (positions, a causal mask) is made
once for each number of samples and kept (`planner.runtime.step.inputs.feed`). Many are views: a
mask that is expanded over the samples takes no more than the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodel.memory.saved import HELD_ANYWAY, Storage, map_storages
from planner.graph import ModelGraph


@dataclass(frozen=True, kw_only=True)
class SideValues:
    """The preamble's values for microbatches of some samples."""

    storage: Mapping[str, Storage]
    """The memory that each lies in."""
    fixed: frozenset[str]
    """Those that depend on no batch input: made once."""

    def num_bytes(self, names: Iterable[str], *, fixed: bool) -> int:
        """Bytes of those of some values that are fixed, or that are not, each storage once."""
        storages = {
            self.storage[name] for name in names
            if name in self.storage and (name in self.fixed) is fixed
        }  # fmt: skip
        return sum(found.num_bytes for found in storages if found.kind not in HELD_ANYWAY)


def find_side_values(graph: ModelGraph, microbatch_size: int) -> SideValues:
    """Return the preamble's values for microbatches of some samples."""
    program = graph.preamble.bind(microbatch_size)
    storages = map_storages(program).storage
    return SideValues(
        storage={name: storages[name] for name in program.outputs},
        fixed=frozenset(name for name in program.outputs if not program.only((name,)).inputs),
    )
