"""What a training system can express, as data: the record of a stack, and finding it by name.

A stack is declared once (`known`). Emitters refuse what it does not express, and a search for one
of its executions tries nothing else, so that its plans can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from planner.errors import PlanError
from planner.language.plan.parts import Precision

Recomputed = Literal["none", "full", "core attention", "cheap ops", "other ops", "by layer"]
"""What is run again of layers for the backward, in kinds that training systems have."""

CpKind = Literal["gathered", "heads", "ring", "striped", "other"]
"""How attention is computed on sequences split over cp: keys gathered, heads dealt, or keys passed
from rank to rank; striped where each rank has several pieces of every sequence."""

ExpertsOnTp = Literal["none", "whole", "cut", "other"]
"""Whether ranks of tp have whole matrices of all experts, or a part of every matrix."""

OnHostPart = Literal["optimizer", "activations", "tables"]
"""What may lie in the host's memory."""

OwnCuts = Callable[[tuple[float, ...], int], tuple[int, ...]]
"""From the costs of layers, the head's last, and the pipeline ranks to the rank of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """How a stack splits a transformer over tp: as Megatron-LM does (`tensor_parallel`)."""

    sequence_parallel: Literal["either", "always", "with experts"] = "either"
    """Where what goes from layer to layer has to be split by positions."""
    experts: tuple[ExpertsOnTp, ...] = ("none", "cut", "whole")
    """How the matrices of experts may lie without a mesh of their own."""
    copies_key_heads: bool = False
    """Whether tp may be a multiple of the heads of keys and values; else it divides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A training system. Features are those of plans (`planner.emit.features`)."""

    name: str
    """As commands name it."""
    title: str
    """As people do, in messages."""
    executions: tuple[str, ...]
    """Its runtimes (`costmodel/execution/data`), the usual one first."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""
    degrees: tuple[str, ...]
    """Axes, and pp and vpp, that it may have more than one of."""
    zero_stages: tuple[int, ...]
    """Stages of ZeRO that it has."""
    zero_beside: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(feature, stages): those that it has beside a feature, where these are fewer."""
    schedules: tuple[str, ...] | None = ()
    """Pipeline schedules whose job tables it has; None: any table of stages that are dealt
    round-robin, or two a rank in a V."""
    whole_groups: bool = False
    """Whether interleaved stages need a multiple of pp microbatches."""
    cuts: Literal["between layers", "its own"] = "between layers"
    """Where a pipeline is cut."""
    recomputes: tuple[Recomputed, ...] = ("none", "full")
    """Kinds of recomputation, of which all layers have the same."""
    recomputes_first: bool = False
    """Whether it may recompute in full the first layers of each stage, as many in all."""
    on_host: tuple[OnHostPart, ...] = ()
    """What it may have in the host's memory."""
    tensor_parallel: TensorParallel | None = None
    """How it splits layers over tp; None: in ways that no plan tells."""
    experts_named: str = ""
    """A pattern of the names of experts' matrices that it finds, where it finds experts by names;
    empty: it is told them, or has no ep."""
    cp_kinds: tuple[CpKind, ...] = ()
    """How attention may be split over cp."""
    cp_pieces: int = 1
    """Pieces of a sequence that each rank of cp has: their number times cp divides its length."""
    own_dtypes: tuple[str, ...] = ("float32",)
    """Dtypes of models that it trains as they are, without fp32 master weights."""
    precisions: tuple[Precision, ...] = ("bf16",)
    """Precisions with fp32 master weights that it has, those with products in 8 bits that are
    scaled as it scales them."""
    narrow_layers: Literal["all", "chosen"] = "all"
    """With products in 8 bits: whether all layers have them, or some may be left out by name."""
    converts_named: tuple[Precision, ...] = ()
    """Of those precisions whose layers are chosen: where parts of names say what is in 8 bits, and
    not what is left out."""
    narrow_experts: bool = True
    """Whether experts may be multiplied in 8 bits, too."""
    counts_tokens: bool = False
    """Whether microbatches are told in tokens, so that samples have one length."""

    @property
    def features(self) -> frozenset[str]:
        """The features of plans that it expresses, each at least in part."""
        named = {"microbatches", "zero", "precision", "recompute", *self.degrees}
        named |= {f"{part}-on-host" for part in self.on_host}
        if "pp" in self.degrees:
            named |= {"cuts", "schedule"}
            if self.schedules is None:
                named.add("stage-placement")
        if "tp" in self.degrees or self.tensor_parallel is not None:
            named.add("layouts")
        return frozenset(named)

    def zeros_beside(self, feature: str) -> tuple[int, ...]:
        """Return the stages of ZeRO that it has beside a feature."""
        return dict(self.zero_beside).get(feature, self.zero_stages)


STACKS: dict[str, Stack] = {}
"""Every stack by name, filled by `register_stack`."""


def register_stack(stack: Stack) -> Stack:
    """Make a stack known; raise PlanError where one of its names or executions is taken."""
    for other in STACKS.values():
        taken = {other.name, *other.aliases, *other.executions}
        if shared := taken & {stack.name, *stack.aliases, *stack.executions}:
            raise PlanError(
                f"stack {stack.name!r} has the name {min(shared)!r}, which stack {other.name!r} "
                "has already; choose another"
            )
    STACKS[stack.name] = stack
    return stack


def stack_of(execution: str) -> Stack | None:
    """Return the stack whose runtime an execution is; None where plans are for our runtime, or for
    one that no plan is written for.
    """
    return next((stack for stack in STACKS.values() if execution in stack.executions), None)


def stack_named(name: str) -> Stack | None:
    """Return the stack of a name or an alias, if any."""
    return next((s for s in STACKS.values() if name in (s.name, *s.aliases)), None)


def stack_names() -> tuple[str, ...]:
    """Return the names and aliases of all stacks."""
    return tuple(sorted(name for s in STACKS.values() for name in (s.name, *s.aliases)))


def execution_of(name: str) -> str:
    """Return the execution that a stack's name or alias stands for; any other name as it is."""
    stack = stack_named(name)
    if stack is None or name in stack.executions:
        return name
    return stack.executions[0]
