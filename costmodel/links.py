"""How the blocks of a model hang together, whatever their values are called, and what comes to
them from outside.

Stages of equal links hold the same bytes, so a model that repeats a block has few kinds of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodel.memory.saved import HELD_ANYWAY, Storage, map_storages
from planner.language.graph import ModelGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What each block takes from where; an entry for each block but in `makers`."""

    signatures: tuple[int, ...]
    """Equal for blocks of one class that take the same outputs of blocks as far before them, the
    same values that no block makes, and parameters that no other block uses, or the same ones."""
    given: tuple[frozenset[str], ...]
    """Values that it takes and no block makes."""
    untrained: tuple[tuple[int, ...], ...]
    """Places of those of its parameters that get no dense gradient."""
    makers: Mapping[str, tuple[int, int]]
    """The block that makes each value, and the value's place among its outputs."""
    entries: tuple[int, ...]
    """Equal for blocks of one class that take the same outputs of blocks of the same classes, so
    that the same moves to them."""


def find_links(graph: ModelGraph) -> Links:
    """Return the links of a model's blocks."""
    makers = {
        name: (block.index, place)
        for block in graph.blocks
        for place, name in enumerate(block.outputs)
    }
    shared = graph.shared_params
    known: dict[tuple, int] = {}
    signatures, given, untrained, entries = [], [], [], []
    entries_known: dict[tuple, int] = {}
    for block in graph.blocks:
        taken = tuple(
            # How far back the maker lies, not which block it is: layers of a chain are then alike.
            (block.index - makers[name][0], makers[name][1]) if name in makers else name
            for name in block.inputs
        )
        metas = [graph.tensor[name] for name in block.params]
        is_trained = tuple(
            meta.kind == "param" and meta.requires_grad and not meta.table for meta in metas
        )
        # A parameter of its own may have any name; a shared one tells which blocks hold it
        # together.
        names = tuple(name if name in shared else "" for name in block.params)
        signature = block.class_index, taken, names, is_trained
        signatures.append(known.setdefault(signature, len(known)))
        moved = tuple(
            (
                graph.blocks[makers[name][0]].class_index,
                makers[name][1],
                block.inputs.index(name),
                graph.tensor[name].requires_grad,
            )
            if name in makers
            else name
            for name in block.inputs
        )
        entries.append(entries_known.setdefault((block.class_index, moved), len(entries_known)))
        given.append(frozenset(name for name in block.inputs if name not in makers))
        untrained.append(tuple(at for at, trained in enumerate(is_trained) if not trained))
    return Links(
        signatures=tuple(signatures),
        given=tuple(given),
        untrained=tuple(untrained),
        makers=makers,
        entries=tuple(entries),
    )


@dataclass(frozen=True, kw_only=True)
class SideValues:
    """Values that no block makes: of the batch the preamble makes them for each microbatch, others
    (positions, a causal mask) once for each number of samples
    (`planner.runtime.batches.inputs.feed`). Many are views: a mask that is expanded over the
    samples takes no more than the mask.
    """

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
