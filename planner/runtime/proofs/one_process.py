"""The single process that `planner verify` compares with: the user's module, trained alone.

It reads nothing of lowering, schedules or collectives, and of the capture four things: which
dims of the batch count samples, whether the model computes across them, which buffers it moves
whatever they are, and over which labels its loss is a mean. It is trained a
few times side by side: as it is, and with its weights moved by one unit in the last place
and its samples in another order, which nothing but rounding tells from the first. How far
these come apart is the rounding of each tensor.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from planner.capture.diagnose import first_line
from planner.capture.flex import flex_written_out
from planner.capture.norms import without_sync
from planner.capture.outside import stored_tensors
from planner.capture.source.model_file import ModelSource
from planner.errors import ModelError
from planner.language.graph.batch import call_with_batch, loss_of
from planner.runtime.batches.inputs.feed import CutBatch
from planner.runtime.proofs.promote import ReferenceMode, held_tensors, promote_module
from planner.runtime.proofs.users_errors import is_torchs
from planner.runtime.state.out_of_memory import is_out_of_memory

Step = dict[str, dict[str, Tensor]]
"""What one step of training made, by kind: ``loss``, ``gradient``, ``norm``, ``parameter``,
``buffer``.

Tensors are whole and by the user's names. A parameter that no gradient reaches has zeros. The norm
is that of all gradients together, by which a training clips them. Buffers are those of the state
dict, after the step, as the first replica has them.
"""


NORM = "all gradients"
"""What the norm is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Samples that the model sees at once, and the replica whose buffers they move."""

    replica: int
    samples: range


def build_with_values(source: ModelSource) -> nn.Module:
    """Build the user's module; parameters on the meta device get values, the same at each call.

    A model whose weights come from files may be built without them, and any values tell whether
    a plan computes what one process does.
    """
    torch.manual_seed(0)
    module = source.build()
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{source.path.name}: model() returned {type(module).__name__} in a process that "
            "trains; return an nn.Module in each"
        )
    drawn: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is None or not param.is_meta or param._backward_hooks:
                continue
            if id(param) not in drawn:  # (a tied parameter stays one)
                values = torch.empty_like(param, device="cpu", requires_grad=False)
                # Of a norm, small weights would leave nothing of what it scales.
                values = values.normal_(std=0.02) if param.dim() > 1 else values.fill_(1)
                drawn[id(param)] = nn.Parameter(values, requires_grad=param.requires_grad)
            part._parameters[name] = drawn[id(param)]
    return module


class OneProcess:
    """A module of the user's own in training. Mutable: weights, buffers, optimizer state.

    It goes through the batch by the pieces it is given. Each replica has its own buffers,
    as in a plan, moved by the pieces of that replica alone.
    """

    def __init__(
        self,
        source: ModelSource,
        values: nn.Module,
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        own: torch.dtype,
        draws: Callable[[], AbstractContextManager[Any]],
        moved: int | None = None,
        backwards: bool = False,
        moved_once: Collection[str] = (),
    ) -> None:
        """The module is built anew, as the user builds it, with the values of `values` in fp64.

        `moved_once` names buffers that each piece of a batch finds as the first one did. `own` is
        the dtype that fp64 stands for; `draws` is entered around forward and backward. `moved`
        seeds how weights are moved by one unit in the last place; `backwards` goes through the
        samples in another order.
        """
        self.module = without_sync(build_with_values(source))  # ranks of one process are no peers
        promote_module(self.module, values)
        self._source, self._draws, self._backwards = source, draws, backwards
        self._moved_once = frozenset(moved_once)
        self._own, self._numbers = own, torch.get_default_dtype()
        if moved is not None:
            _move(self.module, moved)
        self._optimizer = optimizer(self.module.parameters())
        self._buffers: dict[int, dict[str, Tensor]] = {}

    def step(
        self,
        cut: CutBatch,
        pieces: Sequence[Piece],
        weigh: Callable[[CutBatch, Sequence[range]], Sequence[float]],
    ) -> Step:
        """Train on a batch, piece by piece; of several, a piece's loss counts by what `weigh` says.

        The default dtype is fp64 meanwhile.
        """
        if self._backwards:
            cut, pieces = _reordered(cut, pieces)
        self._optimizer.zero_grad()
        replicas = sorted({piece.replica for piece in pieces})
        if not self._buffers and len(replicas) > 1:
            self._buffers = {replica: self._held_buffers() for replica in replicas}
        begun = {
            name: tensor
            for name, tensor in (self._held_buffers() if self._moved_once else {}).items()
            if name in self._moved_once
        }
        total = torch.zeros((), dtype=torch.float64)
        runs = [piece.samples for piece in pieces]
        weights = weigh(cut, runs) if len(runs) > 1 else [1.0]
        for piece, weight in zip(pieces, weights, strict=True):
            # A replica's buffers go on from its own piece before, as on its ranks.
            self._write_buffers(self._buffers.get(piece.replica, {}))
            self._write_buffers(begun)
            batch = cut.part(piece.samples)
            # Compiled parts run as they are written: a compiler sees neither draws nor dtypes.
            eager = torch.compiler.set_stance("force_eager")
            # Torch's flex_attention trains on GPUs alone, and under no mode.
            written = flex_written_out()
            with eager, written, self._draws(), ReferenceMode(self._own, self._numbers):
                output = call_with_batch(self.module, batch)
                loss = loss_of(output, batch, self._source.loss)
                # Shares of the whole batch's mean: the gradients of the pieces then add up to its
                # gradient.
                loss = loss * weight
                if not loss.requires_grad:
                    raise ModelError(
                        "the loss of one process has no gradient: all that it depends on is "
                        "frozen, detached or of whole numbers; let parameters that it reaches "
                        "train (requires_grad)"
                    )
                _backward(loss)
            total += loss.detach()
            if len(replicas) > 1:
                self._buffers[piece.replica] = self._held_buffers()
        self._write_buffers(self._buffers.get(replicas[0], {}))
        named = dict(self.module.named_parameters(remove_duplicate=False))
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()
            for n, p in named.items()
            if p.requires_grad
        }
        # (Once each, where a parameter has several names.)
        once = [n for n, _ in self.module.named_parameters() if n in gradients]
        norms = [torch.linalg.vector_norm(gradients[n]) for n in once]
        self._optimizer.step()
        persistent = stored_tensors(self.module)
        buffers = self.module.named_buffers(remove_duplicate=False)
        return {
            "loss": {"loss": total},
            "gradient": gradients,
            "norm": {NORM: torch.stack(norms).norm()},
            "parameter": {n: p.detach().clone() for n, p in named.items()},
            "buffer": {n: b.detach().clone() for n, b in buffers if n in persistent},
        }

    def _held_buffers(self) -> dict[str, Tensor]:
        """Return copies of all the module holds that is no parameter."""
        return {
            name: tensor.detach().clone()
            for name, tensor in held_tensors(self.module).items()
            if not isinstance(tensor, nn.Parameter)
        }

    def _write_buffers(self, values: Mapping[str, Tensor]) -> None:
        held = held_tensors(self.module)
        for name, value in values.items():
            held[name].data = value.clone()


def _backward(loss: Tensor) -> None:
    """``loss.backward()``, inside which function modes would not be active.

    The user's own autograd functions compute there. Raises ModelError for what torch itself finds
    wrong with the user's graph.
    """
    try:
        Variable._execution_engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip
    except RuntimeError as error:
        # An error of Python code, the user's or ours, is told by its place.
        calls = error.__traceback__.tb_next if error.__traceback__ else None
        if is_out_of_memory(error) or any(not is_torchs(f) for f in traceback.extract_tb(calls)):
            raise
        raise ModelError(
            f"the backward of one process fails: {first_line(error)}; mend the model, which does "
            "not train without a plan"
        ) from error


def _move(module: nn.Module, seed: int) -> None:
    """Move each weight up or down by one unit in the last place, or none."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        if param.is_floating_point() or param.is_complex():
            by = torch.randint(-1, 2, param.shape, generator=generator).to(param.dtype)
            param.data.mul_(1 + torch.finfo(param.dtype).eps * by)


def _reordered(cut: CutBatch, pieces: Sequence[Piece]) -> tuple[CutBatch, Sequence[Piece]]:
    """Return a batch in an order that makes the same sums, added up another way.

    Where one piece is the whole batch, its samples are reversed. Of several, the replicas
    are: within one, buffers may move with each piece, in the plan's order.
    """
    if len(pieces) == 1:
        return cut.reversed(), pieces
    return cut, sorted(pieces, key=lambda piece: -piece.replica)
