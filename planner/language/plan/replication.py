"""Ranks that hold the same part of a model, and how they share its weights and states.

What every room computes with data parallelism stands here once: whether ZeRO has replicas to shard
over, into how many shards, and how many bytes a gradient sum takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from planner.language.layout.axes import copies_of_experts
from planner.language.plan.parts import Precision, low_dtype

if TYPE_CHECKING:
    from planner.language.graph import ModelGraph
    from planner.language.layout.axes import Degrees
    from planner.language.plan.plan import Plan

MASTER_FACTOR = 2
"""Bytes of an fp32 master weight, or gradient sum, over those of its 16-bit weight."""


def gradient_factor(precision: Precision) -> int:
    """Return the bytes of a gradient sum over those of its parameter.

    With `precision` "bf16" or "fp16" gradients are summed, and weights updated, in fp32.
    """
    return MASTER_FACTOR if low_dtype(precision) else 1


def has_shards(shape: Sequence[object], dtype: str) -> bool:
    """Whether ZeRO can cut a parameter: it has dims and elements, and its numbers are real."""
    return len(shape) > 0 and 0 not in shape and not dtype.startswith("complex")


def why_no_zero(graph: ModelGraph, precision: Precision) -> str:
    """Return the first block that ZeRO does not take, and why; "" where there is none.

    FSDP2 gathers the parameters of a block as one tensor, so they have one dtype. Complex ones it
    reduces wrongly: they would be trained by other gradients, in silence (torch 2.13).
    """
    for block in graph.blocks:
        metas = [graph.tensor[name] for name in block.params]
        trained = [m for m in metas if m.kind == "param" and m.requires_grad and m.shape]
        whose = f"block {block.name or 'of the model'}"
        if of_complex := [m.fqn for m in trained if m.dtype.startswith("complex")]:
            return f"ZeRO shards no complex parameters, and {whose} trains {of_complex[0]}"
        # (What a precision casts has fp32 copies, which are what is trained.)
        cast = low_dtype(precision)
        cut = [m for m in trained if has_shards(m.shape, m.dtype)]
        dtypes = {"float32" if m.dtype == cast else m.dtype for m in cut}
        if len(dtypes) > 1:
            return (
                f"ZeRO gathers a block's parameters as one tensor, and {whose} trains "
                f"{' and '.join(sorted(dtypes))}"
            )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """How the ranks that hold the same part of a model share it."""

    replicas: int
    """Ranks that hold the same parameters, along the axes "data" of `planner.language.layout.axes`.
    Each trains on its own samples (dp) or positions (cp), so all of them sum gradients."""
    zero_stage: int
    """0: every rank keeps everything. 1: optimizer state, 2: gradients too, 3: weights too are
    sharded over the replicas."""
    copies: int = 1
    """Of the replicas those that hold the same shards under ZeRO, along the axes "copies" (HSDP);
    it divides them."""
    precision: Precision = "model"
    """Dtype of parameters and of gradient sums."""
    expert_replicas: int | None = None
    """Ranks with the same experts, where these lie on a mesh of their own."""
    optimizer_on_host: bool = False
    """Whether optimizer state (with ZeRO the shards, too) lies in the host's memory."""

    @classmethod
    @lru_cache(maxsize=4096)
    def on(
        cls,
        degrees: Degrees,
        *,
        zero_stage: int,
        precision: Precision = "model",
        optimizer_on_host: bool = False,
    ) -> Replication:
        """Return the replication on a stage's mesh. Kept, as a search has few and asks for them at
        every configuration.
        """
        return cls(
            replicas=degrees.along("data"),
            copies=degrees.along("copies"),
            expert_replicas=degrees.expert_replicas if degrees["ep"] > 1 else None,
            zero_stage=zero_stage,
            precision=precision,
            optimizer_on_host=optimizer_on_host,
        )

    @classmethod
    def of(cls, plan: Plan, stage: int) -> Replication:
        """Return the replication of a plan's stage, which may have sizes of its own."""
        return cls.on(
            plan.stage_degrees(stage),
            zero_stage=plan.zero_stage,
            precision=plan.precision,
            optimizer_on_host=plan.optimizer_on_host,
        )

    @property
    def of_experts(self) -> Replication:
        """How ranks share the experts, where these lie on a mesh of their own."""
        replicas = self.expert_replicas or self.replicas
        copies = copies_of_experts(self.copies, replicas)
        return replace(self, replicas=replicas, copies=copies, expert_replicas=None)

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO has replicas to shard over; a group of one has nothing to share."""
        return self.shards > 1

    @property
    def shards(self) -> int:
        """Ranks that optimizer state is split over."""
        return self.replicas // self.copies if self.zero_stage else 1

    @property
    def gradient_factor(self) -> int:
        """Bytes of a gradient sum over those of its parameter."""
        return gradient_factor(self.precision)

    def gradient_bytes(self, param_bytes: float) -> float:
        """Return the bytes that a rank holds of the gradient sum of its parameters."""
        return param_bytes * self.gradient_factor / self.shards
