"""A model as training systems see it: an embedding, numbered layers, a head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from planner.language.graph import ModelGraph
from planner.language.ops.recompute_choice import default_ops
from planner.language.stacks.stack import Recomputed
from planner.language.stacks.transformer_graph import (
    Sizes,
    is_core_attention,
    layer_of_block,
    routes,
    sizes_of,
)


@dataclass(frozen=True, kw_only=True)
class LayeredModel:
    """A model and its layers. Questions of these raise PlanError where it is no chain of them."""

    graph: ModelGraph

    @cached_property
    def layer_of_block(self) -> tuple[int | None, ...]:
        """The number of the layer that each block belongs to (`layer_of_block`)."""
        return layer_of_block(self.graph)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return 1 + max(n for n in self.layer_of_block if n is not None)

    @cached_property
    def layer_classes(self) -> tuple[int, ...]:
        """Classes of blocks that are (parts of) layers."""
        of_block = self.layer_of_block
        found = (b.class_index for b in self.graph.blocks if of_block[b.index] is not None)
        return tuple(dict.fromkeys(found))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Blocks that a stage may begin with, cut between layers: the model's first, the first of
        each layer, and the first after the layers.
        """
        of_block = self.layer_of_block
        layers = [
            at
            for at, n in enumerate(of_block)
            if n is not None and (not at or n != of_block[at - 1])
        ]
        behind = 1 + max(at for at, n in enumerate(of_block) if n is not None)
        ends = [behind] if behind < len(of_block) else []
        return tuple(dict.fromkeys((0, *layers, *ends)))

    @cached_property
    def has_experts(self) -> bool:
        """Whether some layer sends its tokens to experts."""
        return any(routes(self.graph.classes[index]) for index in self.layer_classes)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the model, as far as its graph tells them."""
        return sizes_of(self.graph)

    @cached_property
    def seq_len(self) -> int:
        """Tokens of a sample, 0 where batches are no sequences of one length."""
        return self.sizes.seq_len

    @cached_property
    def dtype(self) -> str:
        """The dtype of its parameters, ``mixed`` where they differ."""
        dtypes = {meta.dtype for meta in self.graph.params}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"

    def selected(self, chosen: Mapping[int, Collection[str]] | None = None) -> Recomputed:
        """Return what selective recomputation runs again of layers: the ops `chosen` of a class, of
        others the default.
        """
        kinds: set[Recomputed] = set()
        for index in self.layer_classes:
            program = self.graph.classes[index]
            ops = set((chosen or {}).get(index, default_ops(program)))
            if ops == {op.name for op in program.ops}:
                kinds.add("full")
            elif ops == {op.name for op in program.ops if is_core_attention(op)}:
                kinds.add("core attention")
            elif ops == set(default_ops(program)):
                kinds.add("cheap ops")
            else:
                kinds.add("other ops")
        return kinds.pop() if len(kinds) == 1 else "other ops"

    def places_by_products(self, pp: int) -> tuple[int, ...]:
        """Return the pp rank of each layer, and then of the head, where a stack cuts a pipeline by
        products alone; none where the graph does not tell their sizes.

        A rank is left once the products up to its last block are more than its part of the whole:
        4 heads d h + 3 f h of a layer and V h of the head (d: width of a head, h: hidden, f: feed-
        forward, V: vocabulary). Source: nanotron, `build_model` (`planner.emit.targets.nanotron`).
        """
        sizes = self.sizes
        if not (sizes.heads and sizes.ffn_hidden and sizes.vocab):
            return ()
        width = sizes.hidden // sizes.heads
        layer = 4 * sizes.heads * width * sizes.hidden + 3 * sizes.ffn_hidden * sizes.hidden
        done = list(accumulate([*[layer] * sizes.layers, sizes.vocab * sizes.hidden]))
        rank, places = 0, []
        for cost in done:
            places.append(rank)
            if cost > done[-1] * (rank + 1) / pp:
                rank += 1
        return tuple(places)
