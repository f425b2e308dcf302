"""What emitters ask of a plan: which layers a stage holds, how tp splits them, what is recomputed.

Everything is read from the plan and its model's graph. A question that needs the graph raises
PlanError where a plan was given without its model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal

from planner.emit.transformer_graph import (
    Sizes,
    is_core_attention,
    layer_of_block,
    router_weights,
    routes,
    sizes_of,
    usual_dims,
)
from planner.errors import PlanError
from planner.graph import ModelGraph
from planner.layout.experts import expert_params
from planner.layout.placement import Replicate, Shard
from planner.ops.recompute_choice import default_ops
from planner.plan import Plan, StagePlan
from planner.plan.node_runs import NodeRun, node_runs
from planner.schedule import Schedule, schedule_of

Recomputed = Literal["none", "full", "core attention", "cheap ops", "other ops", "by layer"]


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

    @cached_property
    def layer_of_block(self) -> tuple[int | None, ...]:
        """The number of the layer that each block belongs to (`layer_of_block`)."""
        return layer_of_block(self.model("the cuts of the plan"))

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return 1 + max(n for n in self.layer_of_block if n is not None)

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
    def layer_classes(self) -> tuple[int, ...]:
        """Classes of blocks that are (parts of) layers."""
        graph = self.model("placements and recomputation of the plan")
        of_block = self.layer_of_block
        return tuple(
            dict.fromkeys(
                block.class_index for block in graph.blocks if of_block[block.index] is not None
            )
        )

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
        graph = self.model("what a stage recomputes")
        chosen = {entry.class_index: set(entry.ops) for entry in self.plan.recomputed}
        kinds: set[Recomputed] = set()
        for index in self.layer_classes:
            program = graph.classes[index]
            ops = chosen.get(index, set(default_ops(program)))
            if ops == {op.name for op in program.ops}:
                kinds.add("full")
            elif ops == {op.name for op in program.ops if is_core_attention(op)}:
                kinds.add("core attention")
            elif ops == set(default_ops(program)):
                kinds.add("cheap ops")
            else:
                kinds.add("other ops")
        return kinds.pop() if len(kinds) == 1 else "other ops"

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether all layers hand on sequences split over tp."""
        handed = {
            layout.outputs[0]
            for layout in self.plan.layouts
            if layout.axis == "tp" and layout.class_index in self.layer_classes
        }
        if self.plan.tp == 1 or not handed:
            return False
        return handed == {"S(1)"}

    def differs_from_usual_tp(self) -> str:
        """Say where tp splits a model unlike Megatron-LM; empty where it does the same.

        There, the products that read what goes from layer to layer are split by their outputs
        (S(0) of a weight), those that add to it by their inputs (S(1)), tables of words and the
        head by the vocabulary (S(0)), and the rest is whole (Shoeybi et al. 2019, section 3), the
        narrow products of latent attention among it (`linear_q_down_proj`, `linear_kv_down_proj`:
        "duplicated"). What
        goes from layer to layer is whole, or split by positions in all layers (Korthikanti et al.
        2022).
        """
        if self.plan.tp == 1:
            return ""
        graph = self.model("placements on tp")
        handed = set()
        for layout in self.plan.layouts:
            if layout.axis != "tp":
                continue
            program = graph.classes[layout.class_index]
            is_layer = layout.class_index in self.layer_classes
            if is_layer:
                handed.add(layout.outputs[0])
            rests = dict(zip(program.params, layout.param_placements, strict=True))
            for name, dim in usual_dims(program, is_layer=is_layer):
                place = rests[name]
                if isinstance(place, Replicate) and name in router_weights(program):
                    continue  # every rank of tp scores all experts
                usual = Replicate() if dim is None else Shard(dim)
                if not (type(place) is type(usual) and getattr(place, "dim", None) == dim):
                    fqn = program.tensor[name].fqn
                    if not fqn.startswith(program.name):  # of a class of several blocks
                        fqn = f"{program.name}.{fqn}"
                    return (
                        f"{fqn} lies as {place} where it has {usual}, which a search takes with "
                        f"`pins` '{fqn}: {usual}@tp'"
                    )
        if len(handed) > 1 or not handed <= {"R", "S(1)"}:
            return f"layers hand on {' and '.join(sorted(handed))}, and it has R or S(1) in all"
        return ""

    @property
    def has_experts(self) -> bool:
        """Whether some layer sends its tokens to experts."""
        graph = self.model("whether the model has experts")
        return any(routes(graph.classes[index]) for index in self.layer_classes)

    @property
    def experts_on_tp(self) -> Literal["none", "whole", "cut", "other"]:
        """Whether ranks of tp have whole matrices of all experts, or a part of every matrix."""
        graph = self.model("placements on tp")
        kinds: set[Literal["whole", "cut", "other"]] = set()
        for layout in self.plan.layouts:
            if layout.axis != "tp" or layout.class_index not in self.layer_classes:
                continue
            program = graph.classes[layout.class_index]
            places = dict(zip(program.params, layout.param_placements, strict=True))
            for name in expert_params(program):
                place = places[name]
                if isinstance(place, Replicate):
                    kinds.add("whole")
                else:  # dim 0 counts experts
                    kinds.add("cut" if isinstance(place, Shard) and place.dim else "other")
        if not kinds:
            return "none"
        return kinds.pop() if len(kinds) == 1 else "other"

    def cp_kind(self) -> Literal["gathered", "heads", "other"]:
        """How attention is computed on sequences split over cp: keys gathered, or heads dealt."""
        graph = self.model("how cp splits attention")
        kinds: set[Literal["gathered", "heads", "other"]] = set()
        for layout in self.plan.layouts:
            if layout.axis != "cp" or layout.class_index not in self.layer_classes:
                continue
            program = graph.classes[layout.class_index]
            attention = {op.name for op in program.ops if "attention" in op.target}
            for name, sharding in layout.op_shardings.items():
                if name in attention and len(sharding.inputs) >= 3:
                    # Dims of queries, keys and values: batch, heads, positions, width.
                    cut = tuple(
                        place.dim if isinstance(place, Shard) else None
                        for place in sharding.inputs[:3]
                    )
                    if cut == (2, None, None):
                        kinds.add("gathered")
                    else:
                        kinds.add("heads" if cut == (1, 1, 1) else "other")
        return kinds.pop() if len(kinds) == 1 else "other"

    @cached_property
    def trained_dtype(self) -> str:
        """The dtype of the model's parameters as it is trained, ``mixed`` where they differ."""
        if self.plan.precision == "bf16":
            return "bfloat16"
        dtypes = {t.dtype for t in self.model("the dtype of the model").params}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"

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
