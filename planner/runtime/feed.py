"""A global batch cut into this rank's microbatches, and the preamble run on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from planner.batch import flatten_batch
from planner.batch_split import BatchSplit
from planner.errors import ModelError
from planner.graph import Affine, ModelGraph, TensorMeta
from planner.plan import Plan
from planner.program_fx import to_graph_module
from planner.runtime.mesh import Mesh


def split_batch(batch: Any, graph: ModelGraph, plan: Plan, mesh: Mesh) -> list[dict[str, Tensor]]:
    """Return this dp rank's microbatches as tensors by graph name, on the mesh's device.

    Every rank is given the same global batch of dp * num_microbatches * microbatch_size
    samples; `BatchSplit` says which are whose. A tensor without a batch dim goes to every
    microbatch. Raises ModelError when a tensor is missing or of another shape.
    """
    leaves, _ = flatten_batch(batch)
    metas = [graph.tensor[name] for name in graph.batch_inputs]
    missing = [meta.fqn for meta in metas if meta.fqn not in leaves]
    if missing:
        raise ModelError(
            f"the batch lacks {', '.join(missing)}; it has {', '.join(leaves)}; "
            "give batches of the structure the plan was made with"
        )
    split = BatchSplit(num_samples=plan.global_batch, num_microbatches=plan.num_microbatches)
    microbatches: list[dict[str, Tensor]] = [{} for _ in range(plan.num_microbatches)]
    for meta in metas:
        tensor = leaves[meta.fqn]
        expected = meta.shape_at(plan.global_batch)
        if tuple(tensor.shape) != expected:
            raise ModelError(
                f"batch tensor {meta.fqn} has shape {tuple(tensor.shape)}; the plan's global "
                f"batch of {plan.global_batch} samples needs {expected}"
            )
        dtype = getattr(torch, meta.dtype)
        for index, microbatch in enumerate(microbatches):
            samples = split.part(index, mesh.size("dp"), mesh.rank("dp"))
            piece = _piece(tensor, meta, samples)
            microbatch[meta.name] = piece.to(mesh.device, dtype, non_blocking=True)
    return microbatches


def _piece(tensor: Tensor, meta: TensorMeta, samples: range) -> Tensor:
    for dim, size in enumerate(meta.shape):
        if isinstance(size, Affine):
            if size.fixed:
                raise ModelError(
                    f"dim {dim} of batch tensor {meta.fqn} is {size.per_sample} per sample plus "
                    f"{size.fixed}; it can't be cut into microbatches"
                )
            tensor = tensor.narrow(
                dim, size.per_sample * samples.start, size.per_sample * len(samples)
            )
    return tensor


class Preamble:
    """The parameter-free values a stage needs, computed where they are used.

    Values that depend on no batch tensor are computed once and kept.
    """

    def __init__(
        self,
        graph: ModelGraph,
        microbatch_size: int,
        wanted: Iterable[str],
        tensors: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        made = [name for name in wanted if name in graph.preamble.outputs]
        program = graph.preamble.bind(microbatch_size)
        fixed = tuple(n for n in made if not program.only((n,)).inputs)
        moving = tuple(n for n in made if n not in fixed)
        self._fixed = _Part(program.only(fixed), tensors, device)({}) if fixed else {}
        self._moving = _Part(program.only(moving), tensors, device) if moving else None

    def __call__(self, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch tensors of a microbatch and the values made from them."""
        values = {**microbatch, **self._fixed}
        if self._moving is not None:
            values |= self._moving(microbatch)
        return values


class _Part:
    def __init__(self, program: Any, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._program = program
        self._run = to_graph_module(program, {}, device)
        self._params = [tensors[name] for name in program.params]

    @torch.no_grad()
    def __call__(self, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inputs = [microbatch[name] for name in self._program.inputs]
        return dict(zip(self._program.outputs, self._run(*inputs, *self._params), strict=True))
