"""torch.export of a module and its loss, on the meta device and without noise."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from planner.batch import Tree, call_with_batch, loss_of, unflatten_batch
from planner.capture.diagnose import explain, innermost_lines
from planner.capture.on_meta import OnMeta
from planner.capture.precision import MixedDtypes
from planner.capture.read import Reader
from planner.capture.record import Exported
from planner.collector import no_gc
from planner.errors import CaptureError, ModelError
from planner.plan import Precision


def meta_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module with every tensor on the meta device; ties kept, weights not copied."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        held = itertools.chain(
            part._parameters.values(),
            part._buffers.values(),
            (v for v in vars(part).values() if isinstance(v, torch.Tensor)),
        )
        for tensor in held:
            if tensor is None or id(tensor) in memo:
                continue
            local = tensor.detach().to("meta")
            if isinstance(tensor, torch.nn.Parameter):
                local = torch.nn.Parameter(local, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = local
    return copy.deepcopy(module, memo)


class _LossModule(torch.nn.Module):
    """The user's module with its loss: tensors in, scalar out."""

    def __init__(
        self,
        user: torch.nn.Module,
        tree: Tree,
        paths: tuple[str, ...],
        loss: Any,
        precision: Precision,
    ):
        super().__init__()
        self.user = user
        self._planner_tree, self._planner_paths, self._planner_loss = tree, paths, loss
        self._planner_precision = precision
        self.made = OnMeta()

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = dict(zip(self._planner_paths, tensors, strict=True))
        batch = unflatten_batch(self._planner_tree, leaves)
        with self.made:
            if self._planner_precision == "model":
                return self._loss(batch)
            with MixedDtypes():
                return self._loss(batch).float()

    def _loss(self, batch: Any) -> torch.Tensor:
        return loss_of(call_with_batch(self.user, batch), batch, self._planner_loss)


def export_batch(
    module: torch.nn.Module,
    tensors: Mapping[str, Any],
    tree: Tree,
    loss: Any,
    precision: Precision = "model",
) -> Exported:
    """Export a module on meta tensors shaped like `tensors` and read the result.

    For precision "bf16" the module's parameters are bfloat16 already. Raises CaptureError
    in one line, or ModelError when batch and forward do not fit.
    """
    args = tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors.values())
    wrapped = _LossModule(module, tree, tuple(tensors), loss, precision)
    try:
        with _quiet(), no_gc(), innermost_lines():
            program = torch.export.export(wrapped, args, strict=False)
    except ModelError:
        raise
    except Exception as error:
        raise CaptureError(explain(error)) from error
    return Reader(program, module, tuple(tensors), wrapped.made).read()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back warnings, logs and the graph dumps that a failing export prints to stderr.

    What went wrong reaches the user as one line instead (`_explain`).
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
