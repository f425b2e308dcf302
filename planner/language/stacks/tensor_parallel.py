"""How training systems split a transformer over tp and cp, and whether a plan's layouts do.

On tp, products that read what goes from layer to layer are split by their outputs (S(0) of a
weight), those that add to it by their inputs (S(1)), tables of words and the head by the vocabulary
(S(0)), and the rest is whole (Shoeybi et al. 2019, section 3). What goes from layer to layer is
whole, or split by positions in all layers (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.language.graph import Size
from planner.language.layout.class_layout import ClassLayout
from planner.language.layout.placement import Placement, Replicate, Shard
from planner.language.lowering.attention_cut import pieces_of_sequences
from planner.language.lowering.experts import matrix_dims
from planner.language.lowering.routed_experts import router_weights
from planner.language.stacks.layered import LayeredModel
from planner.language.stacks.stack import CpKind, ExpertsOnTp, TensorParallel
from planner.language.stacks.transformer_graph import usual_dims

Dims = tuple[int | None, ...]
"""Dims along which a tensor may be split over an axis; None: it may be whole."""


def dim_of(place: Placement) -> int | None:
    """Return the dim that a placement splits; None: none."""
    return place.dim if isinstance(place, Shard) else None


@dataclass(frozen=True, kw_only=True)
class UsualTp:
    """How layers are split over tp in one way of `TensorParallel`."""

    model: LayeredModel
    ways: TensorParallel

    @cached_property
    def dims(self) -> Mapping[tuple[int, str], Dims]:
        """The dims along which parameters are split, by (class, name); others lie anyhow."""
        found: dict[tuple[int, str], Dims] = {}
        for index, program in enumerate(self.model.graph.classes):
            routers = router_weights(program)
            for name, dim in usual_dims(program, is_layer=index in self.model.layer_classes):
                # Every rank of tp scores all experts.
                found[index, name] = (None, dim) if name in routers else (dim,)
            for name, dims in matrix_dims(program).items():
                found[index, name] = dims if "cut" in self.ways.experts else (None,)
        return found

    @property
    def needs_sequence_parallel(self) -> bool:
        """Whether what goes from layer to layer has to be split by positions."""
        when = self.ways.sequence_parallel
        return when == "always" or (when == "with experts" and self.model.has_experts)

    def hands_on(self, boundary: Mapping[tuple[int, str], Placement]) -> bool:
        """Whether all layers hand on what they should, given placements by (class, tensor) of what
        is not whole.
        """
        handed = {
            str(boundary.get((index, self.model.graph.classes[index].outputs[0]), Replicate()))
            for index in self.model.layer_classes
        }
        return handed == {"S(1)"} or (handed == {"R"} and not self.needs_sequence_parallel)

    def why_not(self, tp: int) -> str:
        """Say why a model is not split over so many ranks; empty where it may be."""
        sizes, graph = self.model.sizes, self.model.graph
        if sizes.heads % tp:
            return f"tp={tp} does not divide the {sizes.heads} attention heads"
        copied = self.ways.copies_key_heads and tp % (sizes.kv_heads or 1) == 0
        if sizes.kv_heads % tp and not copied:
            return f"tp={tp} does not divide the {sizes.kv_heads} heads of keys and values"
        for (index, name), dims in self.dims.items():
            meta = graph.classes[index].tensor[name]
            sizes_of_dims = [1 if dim is None else _number(meta.shape[dim]) for dim in dims]
            if None not in dims and all(size % tp for size in sizes_of_dims):
                return f"tp={tp} does not divide dim {dims[0]} of {meta.fqn}: {sizes_of_dims[0]}"
        length = self.model.seq_len
        if self.needs_sequence_parallel and length % tp:
            return f"tp={tp} does not divide sequences of {length}, which it would split"
        return ""


def _number(size: Size) -> int:
    return size if isinstance(size, int) else 1


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """Layouts of a model's block classes."""

    model: LayeredModel
    layouts: tuple[ClassLayout, ...]

    def _of(self, axis: str) -> Iterator[ClassLayout]:
        return (layout for layout in self.layouts if layout.axis == axis)

    def _of_layers(self, axis: str) -> Iterator[ClassLayout]:
        layers = self.model.layer_classes
        return (layout for layout in self._of(axis) if layout.class_index in layers)

    @cached_property
    def handed_on(self) -> frozenset[str]:
        """How what goes from layer to layer lies on tp."""
        return frozenset(layout.outputs[0] for layout in self._of_layers("tp"))

    @property
    def sequence_parallel(self) -> bool:
        """Whether all layers hand on sequences split over tp."""
        return self.handed_on == {"S(1)"}

    def differs_from_usual_tp(self) -> str:
        """Say where tp splits a model unlike Megatron-LM; empty where it does the same."""
        for layout in self._of("tp"):
            program = self.model.graph.classes[layout.class_index]
            rests = dict(zip(program.params, layout.param_placements, strict=True))
            is_layer = layout.class_index in self.model.layer_classes
            for name, dim in usual_dims(program, is_layer=is_layer):
                place = rests[name]
                if isinstance(place, Replicate) and name in router_weights(program):
                    continue  # every rank of tp scores all experts
                if dim_of(place) != dim:
                    fqn = program.tensor[name].fqn
                    if not fqn.startswith(program.name):  # of a class of several blocks
                        fqn = f"{program.name}.{fqn}"
                    usual = Replicate() if dim is None else Shard(dim)
                    return (
                        f"{fqn} lies as {place} where it has {usual}, which a search takes with "
                        f"`pins` '{fqn}: {usual}@tp'"
                    )
        if len(self.handed_on) > 1 or not self.handed_on <= {"R", "S(1)"}:
            handed = " and ".join(sorted(self.handed_on))
            return f"layers hand on {handed}, and it has R or S(1) in all"
        return ""

    @property
    def experts_on_tp(self) -> ExpertsOnTp:
        """Whether ranks of tp have whole matrices of all experts, or a part of every matrix."""
        kinds: set[ExpertsOnTp] = set()
        for layout in self._of_layers("tp"):
            program = self.model.graph.classes[layout.class_index]
            places = dict(zip(program.params, layout.param_placements, strict=True))
            for name, dims in matrix_dims(program).items():
                dim = dim_of(places[name])
                kinds.add("whole" if dim is None else "cut" if dim in dims else "other")
        if not kinds:
            return "none"
        return kinds.pop() if len(kinds) == 1 else "other"

    @property
    def cp_pieces(self) -> int:
        """Pieces of every sequence that a rank of cp has between layers."""
        return pieces_of_sequences(self._of_layers("cp"))

    @property
    def cp_kind(self) -> CpKind:
        """How attention is computed on sequences split over cp."""
        kinds: set[CpKind] = set()
        if self.cp_pieces > 1:
            return "striped"
        for layout in self._of_layers("cp"):
            program = self.model.graph.classes[layout.class_index]
            attention = {op.name for op in program.ops if "attention" in op.target}
            for name, sharding in layout.op_shardings.items():
                if name in attention and len(sharding.inputs) >= 3:
                    # Dims of queries, keys and values: batch, heads, positions, width.
                    cut = tuple(dim_of(place) for place in sharding.inputs[:3])
                    named: dict[tuple[int | None, ...], CpKind] = {
                        (2, None, None): "gathered",
                        (1, 1, 1): "heads",
                        (2, 2, 2): "ring",
                    }
                    kinds.add(named.get(cut, "other"))
        return kinds.pop() if len(kinds) == 1 else "other"
