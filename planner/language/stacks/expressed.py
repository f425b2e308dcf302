"""What a stack expresses of one model: the choices that a search for it may try."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from planner.errors import PlanError
from planner.language.across.cut.whole_batch import run_whole
from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees
from planner.language.layout.class_layout import ClassLayout
from planner.language.plan.parts import Precision, Recompute, scaling_named
from planner.language.schedule.registry import stage_to_pp_rank
from planner.language.stacks import rules
from planner.language.stacks.layered import LayeredModel
from planner.language.stacks.narrow_layers import (
    tile_of,
    why_not_narrow,
    why_not_rows,
    widths_of_layers,
)
from planner.language.stacks.stack import Stack, execution_of, stack_of
from planner.language.stacks.tensor_parallel import LaidOut, UsualTp

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""What a search may recompute of a stage."""


@dataclass(frozen=True, kw_only=True)
class Expressed:
    """What a stack expresses of a model. Reasons are words, empty where it expresses a choice."""

    stack: Stack
    graph: ModelGraph
    accept: tuple[str, ...] = ()
    """As in `Plan`."""

    @cached_property
    def model(self) -> LayeredModel | None:
        """The model as layers; None where it is no chain of them, so that nothing that the stack
        says of layers holds.
        """
        model = LayeredModel(graph=self.graph)
        try:
            _ = model.layer_of_block
        except PlanError:
            return None
        return model

    @cached_property
    def why_no_model(self) -> str:
        """Why no plan of the model can be written for the stack, whatever is chosen."""
        if self.model is None:
            return (
                f"{self.graph.name} is no chain of numbered layers between an embedding and a head"
            )
        if not self.graph.unit.is_sample:
            return f"its samples belong together in {self.graph.unit.spelled}"
        return rules.why_not_counted(self.stack, self.model.seq_len)

    @cached_property
    def usual(self) -> UsualTp | None:
        """How layers are split over tp; None: not at all, or anyhow where there are no layers."""
        if self.model is None or self.stack.tensor_parallel is None:
            return None
        return UsualTp(model=self.model, ways=self.stack.tensor_parallel)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Blocks that a stage may begin with; none: any."""
        return self.model.starts if self.model is not None else ()

    @cached_property
    def num_pieces(self) -> int:
        """How many stages there may be at most."""
        return len(self.starts) or len(self.graph.blocks)

    def cuts(self, num_stages: int) -> tuple[int, ...]:
        """Return the only stage boundaries that the stack has; none where they are chosen, or where
        it has none (`why_no_cuts`).
        """
        if not self._cuts_itself(num_stages) or self.why_no_cuts(num_stages):
            return ()
        assert self.model is not None
        places, starts = self.model.places_by_products(num_stages), self.model.starts
        # What precedes the layers is on the first rank.
        behind = starts[-len(places) :]
        cuts = [0, *(behind[places.index(rank)] for rank in range(1, num_stages))]
        return (*cuts, len(self.graph.blocks))

    def why_no_cuts(self, num_stages: int) -> str:
        """Of a pipeline of so many stages."""
        title = self.stack.title
        if num_stages > self.num_pieces:
            return f"{title} cuts between layers, into {self.num_pieces} stages at most"
        if not self._cuts_itself(num_stages) or self.model is None:
            return ""
        places = self.model.places_by_products(num_stages)
        if not places:
            return f"{title} cuts by sizes that the model's graph does not tell"
        if set(places) != set(range(num_stages)):
            return f"{title} cuts by products, and leaves some of {num_stages} ranks without any"
        return ""

    def _cuts_itself(self, num_stages: int) -> bool:
        return self.stack.cuts == "its own" and self.model is not None and num_stages > 1

    def why_not_cut(self, starts: tuple[int, ...]) -> str:
        """Of stages that begin with these blocks."""
        if why := self.why_no_cuts(len(starts)):
            return why
        own = self.cuts(len(starts))[:-1]
        if own and starts != own:
            return f"{self.stack.title} cuts before blocks {', '.join(map(str, own[1:]))}"
        inside = [start for start in starts if self.starts and start not in self.starts]
        return f"{self.stack.title} does not cut before block {inside[0]}" if inside else ""

    def why_not_size(self, name: str, size: int) -> str:
        """Of the size of an axis, or of pp or vpp."""
        if size == 1:
            return ""
        if name not in self.stack.degrees:
            return f"{self.stack.title} has none"
        if name == "tp":
            return rules.why_not_placed_on_tp(self.stack) or rules.why_not_tp(self.usual, size)
        if name == "ep":
            return self._why_not_ep
        if name == "cp" and self.model is not None:
            return rules.why_not_pieces(self.stack, size, self.model.seq_len)
        if name == "pp":
            return self.why_no_cuts(size)
        return ""

    @cached_property
    def _why_not_ep(self) -> str:
        return rules.why_not_ep(self.stack, self.graph)

    def why_not_parts(self, degrees: Degrees, num_microbatches: int) -> str:
        """Of a mesh whose ranks take samples of their own."""
        parts = degrees.along("batch")
        if parts == 1:
            return ""
        whole = run_whole(self.graph, parts, num_microbatches=num_microbatches, accept=self.accept)
        if whole is self.graph:
            return ""
        return f"the model computes across all samples, and {self.stack.title} across a replica's"

    def why_no_zero(self, zero: int, beside: Collection[str] = ()) -> str:
        """Of a stage of ZeRO beside features."""
        found = (rules.why_not_beside(self.stack, name, zero) for name in beside)
        return rules.why_no_zero(self.stack, zero) or next(filter(None, found), "")

    def why_no_schedule(self, name: str, *, pp: int, vpp: int, num_microbatches: int) -> str:
        """Of a schedule, by its name, whose sizes it takes."""
        stack = self.stack
        if why := self.why_not_size("vpp", vpp):
            return why
        if why := self.why_no_cuts(pp * vpp):
            return why
        if stack.schedules is None:
            homes = stage_to_pp_rank(name, pp, vpp)
            return rules.why_not_placed(stack, homes, pp=pp, vpp=vpp)
        if name not in stack.schedules:
            return f"{stack.title} has the schedules {', '.join(stack.schedules)}"
        return rules.why_not_microbatches(stack, pp=pp, vpp=vpp, num_microbatches=num_microbatches)

    @cached_property
    def recomputes(self) -> tuple[Recompute, ...]:
        """What a plan may recompute, the same of all blocks."""
        kinds = {"none": "none", "full": "full", "selective": "cheap ops"}
        if self.model is not None:
            kinds["selective"] = self.model.selected()
        return tuple(choice for choice in RECOMPUTES if kinds[choice] in self.stack.recomputes)

    def why_no_recompute(self, choice: Recompute) -> str:
        """Of a recomputation of all blocks."""
        if choice in self.recomputes:
            return ""
        return f"{self.stack.title} recomputes all layers alike, {' or '.join(self.recomputes)}"

    def why_not_on_host(self, part: str) -> str:
        """Of something in the host's memory."""
        if part in self.stack.on_host:
            return ""
        may = f" but the {self.stack.on_host[0]}" if self.stack.on_host else ""
        return f"{self.stack.title} has nothing on the host{may}"

    def why_no_precision(self, precision: Precision) -> str:
        """Of a precision."""
        dtype = LayeredModel(graph=self.graph).dtype
        found = rules.why_no_precision(self.stack, precision, dtype)
        if found or self.model is None or not scaling_named(precision):
            return found
        rows = why_not_rows(self.stack, self.model.seq_len, precision)
        widths = widths_of_layers(self.model, tile_of(precision))
        return why_not_narrow(self.stack, widths, precision) or rows

    def why_not_laid_out(self, layouts: tuple[ClassLayout, ...], degrees: Degrees) -> str:
        """Of layouts of the model's block classes on a mesh."""
        if self.model is None:
            return ""
        laid = LaidOut(model=self.model, layouts=layouts)
        if degrees["tp"] > 1 and (why := _why_not_on_tp(self.stack, laid, degrees)):
            return why
        if degrees["cp"] > 1:
            return rules.why_no_cp(self.stack, laid.cp_kind, degrees["cp"], self.model.seq_len)
        return ""


def _why_not_on_tp(stack: Stack, laid: LaidOut, degrees: Degrees) -> str:
    own = rules.why_not_experts(stack, laid) if degrees["ep"] == 1 else ""
    return own or rules.why_not_laid_out(stack, laid)


def expressed_of(
    execution: str, graph: ModelGraph, accept: tuple[str, ...] = ()
) -> Expressed | None:
    """Return what the stack of an execution expresses of a model; None: everything."""
    stack = stack_of(execution_of(execution))
    return None if stack is None else Expressed(stack=stack, graph=graph, accept=accept)
