"""The vocabulary of plans, and everything that runs at training time.

    engine = planner.apply("plan.json", model, optimizer=optimizer)
    loss = engine.step(batch)

Importing the package loads neither torch nor anything else heavy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from planner.runtime.batches.count_tokens import count_tokens
from planner.runtime.batches.sampler import OwnPart, ShardedSampler
from planner.runtime.step_log import StepLog

if TYPE_CHECKING:
    from planner.integrations.prepare import PreparedLoader, PreparedModel, PreparedOptimizer
    from planner.language.ops.record import Arithmetic
    from planner.language.plan import Plan
    from planner.runtime.step.engine import Engine

__all__ = [
    "OwnPart",
    "ShardedSampler",
    "StepLog",
    "apply",
    "count_tokens",
    "has_sparse_gradient",
    "prepare",
    "recorded",
    "register_rule",
]


def apply(
    plan: Plan | str | os.PathLike[str],
    model: Any,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    loss: Any = None,
    max_grad_norm: float | None = None,
    deferred_batch_norm: bool = False,
    loss_weight: Callable[[Any], float] | Literal["sum"] | None = None,
    accept: Iterable[str] = (),
    weights: str | os.PathLike[str] | None = None,
    check_values: bool = True,
    pad: Mapping[str, float] | None = None,
    balance_documents: bool = True,
) -> Engine:
    """Return an engine that trains `model`, an unmodified nn.Module, as the plan says.

    Every process of the plan calls this with the same arguments. `model` may be a function that
    builds the module, or a module on the meta device: each rank then makes the pieces it holds,
    with the values that one process would draw, and none has the model whole. The engine takes the
    weights of a module over and leaves it on the meta device, without values; get them back with
    ``model.load_state_dict(engine.full_state_dict(), assign=True)``. `optimizer` is a torch
    optimizer over ``model.parameters()``, taken over by the engine with its param groups; or a
    class or function that makes one, or a list, from parameters; or None for AdamW. `scheduler` is
    a learning-rate scheduler of that optimizer, or several, which every update steps; without it
    the script steps its own after ``engine.step``. `loss` is a function of (output, batch) for a
    model that does not return its loss. With `max_grad_norm`, gradients are clipped by the norm
    over the whole model. With `deferred_batch_norm`, running statistics of BatchNorm are those of
    the whole batch, though each microbatch is normalised by its own; a plan that cuts the batch of
    such a model warns without it (BatchStatisticsWarning). `loss_weight` is for a loss that is a
    mean over something else than samples, or than the labels of a cross-entropy: from a part of the
    batch to how much of it counts, such as ``lambda part: part["mask"].sum()``; "sum" is for a loss
    that is a sum over samples, whose parts are added instead of averaged. A plan that cuts a batch
    across whose samples the model computes is refused; `accept` takes names of what may differ from
    one process, beside those of the plan: "local-samples", "local-buffers", "unknown-ops".
    `weights` is a path to
    take the model's values from (safetensors, a ``.pt`` state dict or a checkpoint), of which each
    rank reads its own pieces. `pad` gives by path what fills a batch's tensors up to the next of
    the shapes that the plan states, such as ``{"ids": 0, "labels": -100}``. With `check_values` a
    step whose loss or gradients are NaN or infinite raises, before weights change, and says where
    that began; with precision "fp16" where no smaller scale of the loss may help, and a step whose
    gradients are not finite is passed over. With `balance_documents` samples of packed documents
    change places in their global batch, so that replicas and microbatches get about as much of
    attention's work, where one process computes the same. Raises PlanError or ModelError when plan,
    model and processes do not belong together.
    """
    from planner.runtime.apply import apply_plan

    return apply_plan(
        plan,
        model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss=loss,
        max_grad_norm=max_grad_norm,
        deferred_batch_norm=deferred_batch_norm,
        loss_weight=loss_weight,
        accept=accept,
        weights=weights,
        check_values=check_values,
        pad=pad,
        balance_documents=balance_documents,
    )


def has_sparse_gradient(param: Any) -> bool:
    """Whether a parameter that a function `optimizer=` is given has a sparse gradient: a table that
    the model looks up with ``sparse=True`` alone. Such are for SparseAdam.
    """
    from planner.runtime.state.tables import has_sparse_gradient

    return has_sparse_gradient(param)


def prepare(
    plan: Plan | str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    loader: Any = None,
    scheduler: Any = None,
    *,
    accumulate: int = 1,
    loader_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[PreparedModel, PreparedOptimizer, PreparedLoader | None, Any]:
    """Return model, optimizer, loader and scheduler of a loop that stays as it is.

    For a loop of forward, ``loss.backward()`` and ``optimizer.step()``, as `accelerate` has it:
    a call of the model in training mode is `Engine.step`, and `accumulate` calls make an update.
    The loader (a dataset or DataLoader of global batches, with `loader_options` of
    `Engine.loader`) gives each replica its own part; without it every rank calls the model with
    the whole batch. ``model.engine`` is the engine, which saves and loads. The scheduler is
    returned as it is. `options` are those of `planner.apply`; gradients are clipped by its
    `max_grad_norm`. Raises PlanError as `planner.apply` does, and later where the loop does
    something else than was said here.
    """
    from planner.integrations.prepare import prepare as prepared

    return prepared(
        plan,
        model,
        optimizer,
        loader,
        scheduler,
        accumulate=accumulate,
        loader_options=loader_options,
        **options,
    )


def recorded(
    script: str | os.PathLike[str], *args: str
) -> tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]:
    """Return model() and batch(size), of which a model file is made, of a training script.

        model, batch = planner.recorded("train.py", "--epochs", "3")

    The script, for one process, runs with `args` up to its first backward, and writes no files. Its
    model is the one that it calls there, with the loss that it computes; batches are like its first
    one, with what the loss is given beside the model's output as `target`. A plan that is searched
    for these is what `planner launch` with `unmodified` trains the script by. Raises ModelError
    for a script without a training step, or with batches of a single sample.
    """
    from planner.integrations.script.recorded import recorded as of_script

    return of_script(script, *args)


def register_rule(
    op: Any,
    dims: str | Callable[..., str | None],
    *,
    flop: Callable[..., float] | None = None,
    divided: Mapping[str, str] | None = None,
    contiguous: bool = False,
    arithmetic: Arithmetic | None = None,
) -> None:
    """Say how a custom op (of `torch.library`) is divided among ranks, and what it costs.

    `op` is the op or its name, ``"mine::gated"``. `dims` has a letter for each dim of each tensor,
    as an einsum: ``"bsd, df -> bsf"``. Cutting a letter cuts all tensors that have it, and others
    stay whole; a letter that an output lacks is summed over in it, so that ranks have terms of
    that sum. ``_`` is a dim that is never cut, ``...`` any leading dims, and ``+`` before a tensor
    says that it is added after the sum (a bias). Or `dims` is a function of the op's arguments
    that returns such a text, or None where the op can't be cut; it is given a tensor by its
    `shape` (whole) and `dtype` (a name).

    `flop` is a function of the same arguments: floating-point operations of a forward (a
    multiply-add is 2). Without it they are those of an einsum where a letter is summed over, else
    one for each entry made. `divided` names arguments that count what a letter runs over, such as
    ``{"num_heads": "h"}``: on a piece they are smaller. With `contiguous` entries along a dim
    belong together in order, as channels of a group do; without it a piece may be any of them.
    `arithmetic` is what bounds the time: "matmul" by default where `flop` is given or a letter is
    summed over, else "memory".

    Call it where the op is defined: in the model file, in a module which that imports, or in a
    plugin. The same op given again replaces its rule. A rule is taken as given; `planner verify`
    shows whether it is right. Raises ValueError for a text that is no rule and for an op which the
    catalogue has; LayoutError comes later, where a call's tensors are not what the rule says.
    """
    from planner.language.ops.users import register_rule as registered

    registered(op, dims, flop=flop, divided=divided, contiguous=contiguous, arithmetic=arithmetic)
