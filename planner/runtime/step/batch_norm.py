"""Running statistics of the whole batch, though each microbatch is normalised by its own.

Programs made by `planner.language.across.cut.batch_statistics.deferred` leave mean and variance of
each microbatch in the buffers. They are merged over the step's microbatches and their parts on
other ranks (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances", 1979), and the running ones move once, as one device would move them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import PlanError
from planner.language.across.cut.batch_statistics import CUMULATIVE, BatchNorm, batch_norms
from planner.language.graph import ModelGraph, TensorMeta
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.stage.stage import StageModule


@dataclass(frozen=True, slots=True)
class Moments:
    """Values seen per channel, their mean, and the sum of squared distances from it; fp64."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values together."""
        count = self.count + other.count
        # n_b / n; the squares around both means differ by (mean_b - mean_a)^2 n_a n_b / n.
        share = other.count / count.clamp(min=1)
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + share * apart,
            self.squares + other.squares + apart.square() * self.count * share,
        )


@dataclass(slots=True)
class _Layer:
    """A layer's buffers, what they held when the step began, and the moments so far.

    Attributes:
        norm: the layer in the graph.
        source: what it normalises, [samples, channels, ...].
        mean: the buffer of running means [channels].
        var: the buffer of running variances [channels].
        tracked: the buffer that counts steps, if any.
        before: what `mean` and `var` held when the step began.
        moments: of this rank's microbatches so far.
    """

    norm: BatchNorm
    source: TensorMeta
    mean: Tensor
    var: Tensor
    tracked: Tensor | None
    before: tuple[Tensor, Tensor]
    moments: Moments

    def begin(self) -> None:
        self.before = self.mean.clone(), self.var.clone()
        zeros = torch.zeros_like(self.mean, dtype=torch.float64)
        self.moments = Moments(zeros.new_zeros(()), zeros, zeros)

    def add(self, num_samples: int) -> None:
        """Take in what one microbatch left in the buffers."""
        count = self.source.numel_at(num_samples) // len(self.mean)
        # The kernel divides by count - 1: there is no such variance of a single value.
        squares = self.var.double() * (count - 1) if count > 1 else torch.zeros_like(self.before[1])
        # (Filled on the device: a copy of a number from here would wait for it.)
        seen = torch.full_like(self.moments.count, count)
        made = Moments(seen, self.mean.double(), squares)
        self.moments = self.moments.merge(made)

    def finish(self, moments: Moments) -> None:
        if self.tracked is not None:
            self.tracked += 1
        step: float | Tensor = self.norm.momentum
        if step == CUMULATIVE:
            assert self.tracked is not None, "a capture marks layers that count"
            step = self.tracked.double().reciprocal()
        # Unbiased, as the running variance of torch's BatchNorm is.
        var = moments.squares / (moments.count - 1).clamp(min=1)
        for buffer, old, new in zip(
            (self.mean, self.var), self.before, (moments.mean, var), strict=True
        ):
            # (The buffer holds the last microbatch's statistics; `before` has what it held at the
            # start.)
            buffer.copy_((1 - step) * old.double() + step * new)


class DeferredStatistics:
    """The layers of this rank's stages. Mutable: it gathers over a step.

    Raises PlanError when two layers share running statistics: which moves first would matter.
    """

    def __init__(
        self, graph: ModelGraph, plan: Plan, mesh: Mesh, stages: Mapping[int, StageModule]
    ) -> None:
        self._mesh = mesh
        self._layers: dict[int, list[_Layer]] = {}
        owner: dict[str, str] = {}
        for norm in batch_norms(graph):
            if norm.running_mean is None or norm.running_var is None:
                continue
            if norm.running_mean in owner:
                raise PlanError(
                    f"{norm.module} runs more than once in a step with the same running "
                    "statistics, which can't be deferred; leave deferred_batch_norm out"
                )
            owner[norm.running_mean] = norm.module
            block = graph.blocks[norm.block_index]
            for index, stage in stages.items():
                if block.index in plan.stages[index].blocks:
                    source = graph.classes[block.class_index].tensor[norm.source]
                    self._layers.setdefault(index, []).append(_layer(norm, source, stage))

    def begin(self) -> None:
        """Start a step."""
        for layer in self._all():
            layer.begin()

    @torch.no_grad()
    def add(self, stage_index: int, num_samples: int) -> None:
        """Take in what the forward of a microbatch of so many samples left in a stage."""
        for layer in self._layers.get(stage_index, ()):
            layer.add(num_samples)

    @torch.no_grad()
    def finish(self) -> None:
        """Move the running statistics, equally on all ranks that have them."""
        layers = self._all()
        if not layers:
            return
        # One message for all layers: of each its count, means and squares, in a row.
        own = [(x.moments.count.view(1), x.moments.mean, x.moments.squares) for x in layers]
        flat = torch.cat([part for parts in own for part in parts])
        sizes = [len(part) for parts in own for part in parts]
        for layer, moments in zip(layers, self._merged(flat, sizes), strict=True):
            layer.finish(moments)

    def _merged(self, flat: Tensor, sizes: list[int]) -> list[Moments]:
        group = self._mesh.group("data")
        rows = [flat]
        if group is not None:
            rows = [torch.empty_like(flat) for _ in range(self._mesh.size("data"))]
            dist.all_gather(rows, flat, group=group)
        total: list[Moments] = []
        # Of ranks that saw the same samples one counts.
        for number in self._mesh.first_of_samples_in_data():
            parts = rows[number].split(sizes)
            found = [
                Moments(count[0], mean, squares)
                for count, mean, squares in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
            ]
            total = [a.merge(b) for a, b in zip(total, found, strict=True)] if total else found
        return total

    def _all(self) -> list[_Layer]:
        return [layer for index in sorted(self._layers) for layer in self._layers[index]]


def _layer(norm: BatchNorm, source: TensorMeta, stage: StageModule) -> _Layer:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, var = stage.passed[norm.running_mean], stage.passed[norm.running_var]
    counter = norm.num_batches_tracked
    nothing = torch.zeros_like(mean, dtype=torch.float64)
    return _Layer(
        norm=norm,
        source=source,
        mean=mean,
        var=var,
        tracked=None if counter is None else stage.passed[counter],
        before=(mean, var),
        moments=Moments(nothing.new_zeros(()), nothing, nothing),
    )
