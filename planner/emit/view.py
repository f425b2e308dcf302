"""What emitters ask of a plan: which layers a stage holds, how tp splits them, what is recomputed.

Everything is read from the plan and its model's graph. A question that needs the graph raises
PlanError where a plan was given without its model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from planner.errors import PlanError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan, StagePlan, low_dtype
from planner.language.plan.node_runs import NodeRun, node_runs
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule import Schedule
from planner.language.stacks.layered import LayeredModel
from planner.language.stacks.narrow_layers import LayerWidths, tile_of, widths_of_layers
from planner.language.stacks.stack import CpKind, ExpertsOnTp, Recomputed
from planner.language.stacks.tensor_parallel import LaidOut
from planner.language.stacks.transformer_graph import Sizes, sizes_of, usual_dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a run is started, for scripts."""

    plan_file: str = "plan.json"
    """The plan as its user named it."""
    script: str = "train.py"
    """The user's training script."""
    arguments: tuple[str, ...] = ()
    """The script's own arguments."""
    device: str = ""
    """cpu or cuda; empty: by the plan's cluster."""
    folder: str = "."
    """Where the files are written, from where the plan and the script are named."""

    def path(self, name: str) -> str:
        """Return the path of a written file, from where the plan and the script are named."""
        return os.path.join(self.folder, name) if self.folder != "." else name


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What a stage holds of a model that is an embedding, layers and a head."""

    embedding: bool
    """Everything before the first layer."""
    layers: range
    """Numbers of its layers."""
    head: bool
    """Everything behind the last layer."""


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """A plan, its model's graph if given, and what is asked of both."""

    plan: Plan
    """The plan."""
    graph: ModelGraph | None = None
    """The graph of its model."""
    launch: Launch = Launch()
    """How it is started."""
    accepted: tuple[str, ...] = ()
    """Features that may differ from the plan."""

    @cached_property
    def node_runs(self) -> tuple[NodeRun, ...]:
        """Nodes of equal size and kind in the order of ranks. Raises PlanError where the ranks of a
        node do not follow each other.
        """
        return node_runs(self.plan) or (
            NodeRun(group="", ranks=self.ranks_per_node, nodes=self.num_nodes),
        )

    @property
    def num_nodes(self) -> int:
        """Nodes of the plan's cluster that its ranks fill."""
        if self.plan.cluster.nodes:
            return sum(nodes for _, _, nodes in self.plan.cluster.nodes)
        return ceil(self.plan.world_size / self.plan.cluster.devices_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node. Raises PlanError where nodes would have different numbers.

        A plan is priced for full nodes that follow each other: dealt evenly over nodes that are
        not full, the ranks of one tp group could lie on two of them.
        """
        self.plan.cluster.check_equal_nodes()
        if self.num_nodes == 1:
            return self.plan.world_size
        if self.plan.world_size % self.plan.cluster.devices_per_node:
            raise PlanError(
                f"the plan has {self.plan.world_size} ranks and nodes of "
                f"{self.plan.cluster.devices_per_node}; whole nodes are needed to start it on more "
                "than one: search with `num_devices` a multiple of that"
            )
        return self.plan.cluster.devices_per_node

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``: what the ranks compute on."""
        if self.launch.device:
            return self.launch.device
        return "cpu" if "cpu" in self.plan.cluster.device.lower() else "cuda"

    @cached_property
    def schedule(self) -> Schedule:
        """The plan's job table."""
        return schedule_of(self.plan)

    def model(self, what: str) -> ModelGraph:
        """Return the graph; raise PlanError naming what needs it where there is none."""
        if self.graph is None:
            raise PlanError(f"{what} must be read from the model; give its file behind the plan")
        return self.graph

    def layered(self, what: str) -> LayeredModel:
        """Return the model as layers; raise PlanError naming what needs it where there is none."""
        self.model(what)
        return self._layered

    @cached_property
    def _layered(self) -> LayeredModel:
        assert self.graph is not None
        return LayeredModel(graph=self.graph)

    @cached_property
    def layer_of_block(self) -> tuple[int | None, ...]:
        """The number of the layer that each block belongs to (`layer_of_block`)."""
        return self.layered("the cuts of the plan").layer_of_block

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.layered("the number of layers").num_layers

    @property
    def layer_classes(self) -> tuple[int, ...]:
        """Classes of blocks that are (parts of) layers."""
        return self.layered("placements and recomputation of the plan").layer_classes

    @cached_property
    def parts(self) -> tuple[StageParts, ...]:
        """What each stage holds. Raises PlanError where a cut is not between layers."""
        of_block = self.layer_of_block
        first = next(at for at, n in enumerate(of_block) if n is not None)
        last = max(at for at, n in enumerate(of_block) if n is not None)
        for stage in self.plan.stages[1:]:
            cut = stage.first_block
            if cut < first or cut > last + 1 or of_block[cut] == of_block[cut - 1]:
                raise PlanError(
                    f"the plan cuts the model before block {cut}, inside its embedding, a layer or "
                    "its head; systems cut between these: search again with `balance`"
                )
        return tuple(
            StageParts(
                embedding=stage.first_block < first or stage.first_block == 0,
                layers=self._layers_of(stage.first_block, stage.last_block),
                head=stage.last_block == len(of_block) - 1,
            )
            for stage in self.plan.stages
        )

    def _layers_of(self, first_block: int, last_block: int) -> range:
        numbers = [n for n in self.layer_of_block[first_block : last_block + 1] if n is not None]
        return range(numbers[0], numbers[-1] + 1) if numbers else range(0)

    @cached_property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """What each stage recomputes of its layers, in kinds that other systems have."""
        of_stages = []
        for stage in self.plan.stages:
            if stage.recompute_blocks:
                kinds = set(self._layers_recompute(stage).values())
                kind: Recomputed = kinds.pop() if len(kinds) == 1 else "by layer"
            else:
                kind = self._kinds[stage.recompute]
            of_stages.append(kind)
        return tuple(of_stages)

    @property
    def first_layers_in_full(self) -> int | None:
        """How many layers, the first of each stage, are recomputed in full where the others keep
        all; None where the plan says something else. A stage of fewer layers recomputes them all.
        """
        found = [list(self._layers_recompute(stage).values()) for stage in self.plan.stages]
        most = max(layers.count("full") for layers in found)
        is_first = all(
            layers == ["full"] * min(most, len(layers)) + ["none"] * (len(layers) - most)
            for layers in found
        )
        return most if is_first else None

    def _layers_recompute(self, stage: StagePlan) -> dict[int, Recomputed]:
        """What a stage recomputes of each of its layers."""
        of_layer: dict[int, set[Recomputed]] = {}
        for block, choice in zip(stage.blocks, stage.recompute_by_block, strict=True):
            layer = self.layer_of_block[block]
            if layer is not None:
                of_layer.setdefault(layer, set()).add(self._kinds[choice])
        return {
            layer: kinds.pop() if len(kinds) == 1 else "by layer"
            for layer, kinds in of_layer.items()
        }

    @cached_property
    def _kinds(self) -> dict[str, Recomputed]:
        """The kind of each choice of recomputation that the plan has."""
        kinds: dict[str, Recomputed] = {"none": "none", "full": "full"}
        if "selective" in self.plan.recompute_by_block:
            kinds["selective"] = self._selected()
        return kinds

    def _selected(self) -> Recomputed:
        chosen = {entry.class_index: entry.ops for entry in self.plan.recomputed}
        return self.layered("what a stage recomputes").selected(chosen)

    @cached_property
    def laid_out(self) -> LaidOut:
        """Where the plan's layouts put a model's layers."""
        return LaidOut(model=self.layered("placements of the plan"), layouts=self.plan.layouts)

    @property
    def sequence_parallel(self) -> bool:
        """Whether all layers hand on sequences split over tp."""
        return self.plan.tp > 1 and bool(self.plan.layouts) and self.laid_out.sequence_parallel

    @property
    def is_latent(self) -> bool:
        """Whether layers make queries or keys of narrow products (latent attention)."""
        layered = self.layered("the kind of attention")
        return any(
            dim is None
            for index in layered.layer_classes
            for _, dim in usual_dims(layered.graph.classes[index], is_layer=True)
        )

    def differs_from_usual_tp(self) -> str:
        """Say where tp splits a model unlike Megatron-LM; empty where it does the same."""
        return self.laid_out.differs_from_usual_tp() if self.plan.tp > 1 else ""

    @property
    def has_experts(self) -> bool:
        """Whether some layer sends its tokens to experts."""
        return self.layered("whether the model has experts").has_experts

    @property
    def experts_on_tp(self) -> ExpertsOnTp:
        """Whether ranks of tp have whole matrices of all experts, or a part of every matrix."""
        return self.laid_out.experts_on_tp

    def cp_kind(self) -> CpKind:
        """How attention is computed on sequences split over cp: keys gathered, or heads dealt."""
        return self.laid_out.cp_kind

    @cached_property
    def trained_dtype(self) -> str:
        """The dtype of the model's parameters as it is trained, ``mixed`` where they differ."""
        cast = low_dtype(self.plan.precision)
        return cast or self.layered("the dtype of the model").dtype

    @cached_property
    def widths_of_layers(self) -> tuple[LayerWidths, ...]:
        """How each layer multiplies, in 8 bits or in 16."""
        layered = self.layered("which layers are in 8 bits")
        return widths_of_layers(layered, tile_of(self.plan.precision))

    @cached_property
    def sizes(self) -> Sizes | None:
        """Sizes of the model, None without its graph."""
        return None if self.graph is None else sizes_of(self.graph)

    @property
    def seq_len(self) -> int:
        """Tokens of a sample, 0 where batches are no sequences."""
        sizes = {shape[1] for _, _, shape in self.plan.model.inputs if len(shape) == 2}
        found = sizes.pop() if len(sizes) == 1 else 0
        return found if isinstance(found, int) else 0
