"""Stops a step whose loss or gradients are NaN or infinite, and finds the tensor that was so first.

Each step looks at the loss, which all ranks have, and at norms of gradients: a pass over a rank's
gradients and one number over all ranks, or nothing more where gradients are clipped, as their norm
says the same. The host reads one flag a step. Where the optimizer itself passes a wrong step over
(`can_pass_over`), the update is given to the device before the host waits for the flag, so that
the device has work meanwhile. Only when something is wrong is the step run again, op by op under a
mode that looks at each result. Weights are then still those of before the step.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.language.schedule.jobs import Job, JobKind
from planner.runtime.process import device as devices
from planner.runtime.process.groups.mesh import Mesh
from planner.runtime.state.to_device import to_device

if TYPE_CHECKING:
    from planner.runtime.step.executor import Executor

_PROGRAM = re.compile(r'File "(<eval_with_key>[^"]*)", line (\d+)')
_MAKES_NO_VALUES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_WRITES_CONSTANTS = ("fill", "full", "masked_fill", "scalar_tensor", "where", "constant_pad_nd")
"""Masks: an infinity that they write is one that the model names."""


class ValuesError(RuntimeError):
    """The loss or a gradient is NaN or infinite; the message says where it began."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A tensor that is not finite, though all that it was made from is.

    Attributes:
        order: 0 for a forward, 1 for a backward, -1 for what a step begins with; the microbatch;
            the stage, negative in a backward. The least came first.
        text: what made it, where, in words.
    """

    order: tuple[int, int, int]
    text: str


class Look:
    """Whether a step is wrong: as a flag on the device, and on its way to the host."""

    def __init__(self, is_finite: Tensor, norm: Tensor) -> None:
        """`is_finite` has one element; on the device, `flag` is 1 where it is false, else 0. `norm`
        is not finite where a gradient is not.
        """
        self.flag = is_finite.logical_not().float()
        self._is_finite, self._arrived, self._norm = is_finite, None, norm
        if devices.is_accelerator(is_finite.device):
            # Its own event: the stream gets more to do before the host reads.
            self._is_finite = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._is_finite.copy_(is_finite, non_blocking=True)
            self._arrived = devices.of(is_finite.device).Event()
            self._arrived.record()

    def is_wrong(self) -> bool:
        """Wait for the flag, and nothing that was given to the device since; return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        try:
            return not self._is_finite
        except DataDependentOutputException:  # in a dry run, which has no values
            return False

    def has_finite_gradients(self) -> bool:
        """Whether gradients are finite, and the loss is what is wrong; waits for the device."""
        return bool(self._norm.isfinite())


class ValueCheck:
    """Looks at each step of one engine."""

    def __init__(self, mesh: Mesh, executor: Executor) -> None:
        self._mesh, self._executor = mesh, executor

    def look(self, loss: Tensor | None, gradients: Iterable[Tensor], norm: Tensor | None) -> Look:
        """Return whether the loss, shared already, or a gradient of any rank is not finite.

        `norm` is that of all gradients, where they are clipped; every rank calls this. Without a
        `loss` gradients alone are looked at.
        """
        if norm is None:
            norm = _sum_of_norms(gradients, self._mesh.device)
            if dist.get_world_size() > 1:
                # A sum: a maximum would lose a NaN on some backends.
                dist.all_reduce(norm)
        norm = norm.detach()
        # (A NaN or an infinity in either makes the sum so.)
        both = norm if loss is None else norm + loss.detach().double()
        return Look(both.isfinite(), norm)

    def explain(
        self,
        again: Callable[[], object],
        *,
        step: int,
        loss: Tensor,
        named: Mapping[str, Tensor],
    ) -> ValuesError:
        """Run a step again and return what to raise; every rank calls it.

        `named` are this rank's parameters and what else a step begins with, by name.
        """
        what = f"the loss is {loss.item():g}" if not torch.isfinite(loss) else "a gradient is"
        if torch.isfinite(loss):
            what += " NaN or infinite"
        found = [
            Found(order=(-1, 0, 0), text=f"{name}, before the step: {_describe(tensor)}")
            for name, tensor in named.items()
            if not _is_finite(tensor)
        ]
        if not found:
            mode = _Look(self._executor)
            # Nodes keep the traceback of their forward: it has the op that a gradient is of.
            with torch.autograd.set_detect_anomaly(True, check_nan=False), mode:
                again()
            found = mode.found
        everyone: list[list[Found] | None] = [None] * dist.get_world_size()
        if dist.get_world_size() > 1:
            dist.all_gather_object(everyone, found, group=self._mesh.control)
        else:
            everyone = [found]
        every = [each for some in everyone if some for each in some]
        if not every:
            return ValuesError(
                f"step {step}: {what}; run again, all is finite: it began in "
                "an earlier batch of the step, random numbers or the hardware"
            )
        # Of all ranks' first findings: forwards before backwards, then the earliest microbatch; in
        # a forward the first stage, in a backward the last.
        first = min(every, key=lambda each: each.order)
        return ValuesError(f"step {step}: {what}; first in {first.text}")


def _sum_of_norms(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """A sum of norms, finite if and only if all gradients are (and below 1e19, where a norm in
    fp32 overflows): one pass at the speed of memory, ten times as fast as looking for the largest.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in gradients:
        if grad.numel():
            real = torch.view_as_real(grad) if grad.is_complex() else grad
            alike.setdefault((grad.device, grad.dtype), []).append(real)
    for (_, dtype), members in alike.items():
        wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        norms = torch.stack(torch._foreach_norm(members, dtype=wide))
        total += to_device(norms.sum(), device, torch.float64)
    return total


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor).all())


def _describe(tensor: Tensor) -> str:
    nans, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    counts = [f"{n} {word}" for n, word in ((nans, "NaN"), (infinite, "infinite")) if n]
    return f"{' and '.join(counts)} of {tensor.numel()} entries, shape {list(tensor.shape)}"


class _Look(TorchDispatchMode):
    """Notes the first op whose result is not finite though what it reads is."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor
        self.found: list[Found] = []
        self._lines: dict[str, Mapping[str, tuple[str, str]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = _program_frame(sys._getframe(1))
        if frame is not None:
            lines = frame.f_locals["self"].meta.get("lines", {})
            self._lines[frame.f_code.co_filename] = lines
        name = func._schema.name.split("::")[-1].rstrip("_")
        job = self._executor.job
        if self.found or job is None or name in _MAKES_NO_VALUES:
            return func(*args, **(kwargs or {}))
        # (Before the op: it may write to them.)
        reads_finite = all(map(_is_finite, _tensors((args, kwargs))))
        reads_nan = not reads_finite and any(bool(t.isnan().any()) for t in _floats((args, kwargs)))
        made = func(*args, **(kwargs or {}))
        for tensor in _floats(made):
            if _is_finite(tensor):
                continue
            # A NaN may also begin where infinities are read (inf - inf), as long as no NaN is.
            begins = reads_finite and name not in _WRITES_CONSTANTS
            if begins or (not reads_nan and bool(tensor.isnan().any())):
                self._note(name, tensor, job, frame)
                break
        return made

    def _note(self, name: str, tensor: Tensor, job: Job, frame: FrameType | None) -> None:
        op, line = name, ""
        if frame is not None:
            op, line = self._op_at(frame.f_code.co_filename, frame.f_lineno, name)
        else:
            node = torch._C._current_autograd_node()
            if node is not None:
                op = f"the gradient {node.name().removesuffix('0')} makes"
                places = _PROGRAM.findall("".join(_metadata(node).get("traceback_", ())))
                if places:
                    file, number = places[-1]
                    forward, line = self._op_at(file, int(number), name)
                    op = f"the gradient of {forward}"
        is_forward = job.kind is JobKind.FORWARD
        where = (
            f"{'forward' if is_forward else 'backward'} of stage {job.stage_index}, microbatch "
            f"{job.microbatch_index}"
        )
        text = f"{op}, in the {where}: {_describe(tensor)}{f'; {line}' if line else ''}"
        depth = job.stage_index if is_forward else -job.stage_index
        self.found.append(Found(order=(not is_forward, job.microbatch_index, depth), text=text))

    def _op_at(self, file: str, number: int, default: str) -> tuple[str, str]:
        """The op of a program's line of code, and the user's line that it comes from."""
        node = linecache.getline(file, number).strip().split(" = ")[0].split(":")[0].strip()
        return self._lines.get(file, {}).get(node, (default, ""))


def _metadata(node: Any) -> dict[str, Any]:
    """What anomaly mode wrote on a node of the backward (PyTorch's stub has it as a method)."""
    return dict(node.metadata)


def _program_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not frame.f_code.co_filename.startswith("<eval_with_key>"):
        frame = frame.f_back
    return frame


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _floats(tree: Any) -> list[Tensor]:
    return [t for t in _tensors(tree) if t.is_floating_point() or t.is_complex()]
