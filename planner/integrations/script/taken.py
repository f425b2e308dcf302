"""A model that was taken over from a script: calls, gradients, updates, evaluation.

On rank 0 the script goes on and `Loop` stands in for what it calls. Each rank has an `Engines`,
whose methods are the commands that rank 0 gives (`planner.integrations.script.ranks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import isclose
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from planner.capture.export import meta_copy
from planner.errors import PlanError
from planner.integrations.script.commands import begin
from planner.integrations.script.finding import Found
from planner.integrations.script.loss import Loss, loss_of
from planner.integrations.script.optimizer import groups_of, refuse_changes
from planner.integrations.script.ranks import Ranks, Variables
from planner.integrations.script.values.left import Attributes
from planner.integrations.script.values.notes import (
    Applied,
    AsGiven,
    Output,
    mark_of_loss,
    value_of,
)
from planner.integrations.script.values.outputs import Outputs, made_of, modules_in, outputs_of
from planner.integrations.script.values.pending import Pending, returned
from planner.language.graph.batch import flatten_batch, plain_values
from planner.language.plan import Plan
from planner.runtime.state.users_module.away import tell_gradients


class Loop:
    """What a script's loop does with its model. Mutable: calls whose gradients wait, the engine.

    Attributes:
        model, optimizer: those of the script.
        updates: how many were made.
    """

    def __init__(self, found: Found, plan: Plan | None, variables: Variables) -> None:
        """Without a plan it only notes what the script does, up to its first step."""
        self.model, self.optimizer = found.model, found.optimizer
        self.updates = 0
        self._given, self._variables = plan, variables
        self._signature = inspect.signature(type(found.model).forward)
        self._meta = meta_copy(found.model)
        self._outputs: dict[Any, Outputs] = {}
        self._left = Attributes(self.model, self._meta)
        self._loss: Loss | None = None
        self._ranks: Ranks | None = None
        self._waiting: list[TrainingCall] = []
        self._updated: list[TrainingCall] = []
        self._is_cleared = True
        self._groups: list[list[int]] = []
        self._has_left = False
        """Whether a `zero_grad` of the optimizer left gradients of parameters that it has not."""
        self.reads_outputs: bool | None = None
        """Whether outputs are read beside the loss; None until the first update."""

    @property
    def is_begun(self) -> bool:
        """Whether the engine has the model."""
        return self._ranks is not None

    @property
    def _plan(self) -> Plan:
        assert self._given is not None, "a loop that trains has a plan"
        return self._given

    # -- calls --------------------------------------------------------------------------

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call of the model returns; NotImplemented where the model itself does."""
        trains = self.model.training and torch.is_grad_enabled()
        if not (trains or self.is_begun):
            return NotImplemented
        self._refuse_modes()
        if self.model.training and not trains:
            raise PlanError(
                "the model is called in training mode without gradients, which would draw dropout "
                "and move running statistics; call model.eval() before"
            )
        outputs = self._outputs_of(args, kwargs)
        call = (TrainingCall if trains else EvaluationCall)(self, args, kwargs, outputs)
        numbers = [n for n, leaf in enumerate(outputs.leaves) if isinstance(leaf, Tensor)]
        leaves = list(outputs.leaves)
        made = returned((leaves[n], Output(call, n, leaves[n].dim())) for n in numbers)
        for number, tensor in zip(numbers, made, strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, outputs.spec)

    def _outputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
        key = repr((self.model.training, *_told((args, kwargs))))
        if key not in self._outputs:
            self._meta.train(self.model.training)
            self._outputs[key] = outputs_of(self._meta, args, kwargs)
        self._left.show()
        return self._outputs[key]

    def _refuse_modes(self) -> None:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise PlanError(
                "the model is called under autocast, and the plan says the precision; leave it "
                "out, and search with `precision` bf16 or fp16"
            )

    def leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[Tensor] | None
    ) -> dict[str, Tensor]:
        """Return the plan's batch by path: what the model was given, and behind it the tensors
        that the script's loss was given; without these (None) zeros of their shapes.
        """
        plan = self._plan
        named = self._named(args, kwargs)
        batch = call_as_batch(named, plan.model.batch_tree, list(self._signature.parameters)[1:])
        found, structure = flatten_batch(batch)
        samples = next((len(t) for t in found.values() if t.dim()), 1)
        values = plain_values(structure)
        planned = plain_values(plan.model.batch_tree)
        paths = {path for path, *_ in plan.model.inputs}
        beyond = sorted(found.keys() - paths)
        other = sorted(
            k for k, v in values.items() if planned.get(k, self._default(k)) not in (v, None)
        )
        if beyond or other:
            raise PlanError(
                f"the model is called with {', '.join(beyond or other)}, and the plan was searched "
                f"with {', '.join(sorted(paths | planned.keys()))} (entries of its batches); "
                "search it for batches like these"
            )
        missing = [(path, dtype, shape) for path, dtype, shape in plan.model.inputs
                   if path not in found]  # fmt: skip
        if targets is not None and len(targets) != len(missing):
            raise PlanError(
                f"the script gives the model {', '.join(found)} and its loss {len(targets)} other "
                f"tensors, and the plan's batches have {', '.join(p for p, *_ in missing) or 'no'} "
                "beside these; search the plan for the loss that the script computes"
            )
        units = samples // plan.unit.size
        for number, (path, dtype, shape) in enumerate(missing):
            if targets is not None:
                found[path] = targets[number]
                continue
            sizes = [s if isinstance(s, int) else s[0] * units + s[1] for s in shape]
            found[path] = torch.zeros(sizes, dtype=getattr(torch, dtype))
        return found

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(self.model, *args, **kwargs)
        named = dict(list(bound.arguments.items())[1:])
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name, {})
            elif parameter.kind is parameter.VAR_POSITIONAL:
                rest = named.pop(name, ())
                named |= {f"{name}.{n}": value for n, value in enumerate(rest)}
        return named

    def _default(self, path: str) -> Any:
        parameter = self._signature.parameters.get(path)
        return None if parameter is None else parameter.default

    # -- training -----------------------------------------------------------------------

    def begin(self, call: TrainingCall, loss: Loss) -> Ranks:
        """Give the model to the engine, once. Ranks but rank 0 do not return."""
        if self._ranks is None:
            self._loss = loss
            leaves = self.leaves(call.args, call.kwargs, loss.targets)
            with self.without_left():
                trained = loss.trained(
                    self.model, {path: leaves[path] for path, *_ in self._plan.model.inputs}
                )
                self._ranks = begin(
                    self.model, self.optimizer, trained, self._plan, self._variables
                )
            tell_gradients(self.model, self._has_gradients)
            self._groups = groups_of(self.optimizer)
            # (The capture's forwards have left tensors, too, through the script's hooks.)
            self._outputs.clear()
            self._outputs_of(call.args, call.kwargs)
        assert self._loss is not None, "set where the engine begins"
        if loss.signature != self._loss.signature:
            raise PlanError(
                "the loss is computed in another way than in the first step, and the plan is for "
                "that; compute it by the same functions of the same numbers in every step (what "
                "changes goes into a tensor of the batch)"
            )
        return self._ranks

    def command(self, name: str, *args: Any) -> Any:
        """Run a command on all ranks."""
        assert self._ranks is not None, "the engine has begun"
        with ExitStack() as inside:
            inside.enter_context(self._variables.given())
            inside.enter_context(self.without_left())
            inside.enter_context(torch.inference_mode(False))
            inside.enter_context(torch.enable_grad())
            return self._ranks.all(name, *args)

    def without_left(self) -> AbstractContextManager[None]:
        """Inside, the model has not what stands for what its forward leaves in attributes."""
        return self._left.away()

    def add(
        self, call: TrainingCall, loss: Loss, fetch: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Train on a call's batch, without an update; return its loss, and what modules made."""
        if not self._is_cleared:
            raise PlanError(
                "gradients of the update before were not cleared, so this backward would add to "
                "them; call optimizer.zero_grad() once an update"
            )
        self.begin(call, loss)
        made: tuple[Tensor, dict[str, Tensor]] = self.command(
            "add", self.leaves(call.args, call.kwargs, loss.targets), tuple(fetch)
        )
        self._waiting.append(call)
        return made

    def clear(self, set_to_none: bool = True, *, of_model: bool = True) -> None:
        """Do what ``zero_grad`` does, of the model or of the optimizer."""
        if of_model:
            self._has_left = False
        elif self._has_gradients() and self._beside():
            self._has_left = True
        done = [call for call in self._waiting if call.has_backward]
        if not done:
            self._is_cleared = True
            return
        if len(done) < len(self._waiting):
            raise PlanError(
                "zero_grad() drops the gradients of one call of the model and keeps those of "
                "another, whose loss was read before; call zero_grad() before the model"
            )
        self._waiting.clear()
        self._is_cleared = True
        self.command("forget")

    def clip(self, params: Any, max_norm: float, norm_type: float) -> Tensor:
        """Do what ``clip_grad_norm_`` does over the whole model."""
        given = {id(p) for p in ([params] if isinstance(params, Tensor) else params)}
        own = {id(p) for p in self.model.parameters() if p.requires_grad}
        if norm_type != 2.0 or not own <= given:
            raise PlanError(
                f"clip_grad_norm_ of {len(own & given)} of the model's {len(own)} parameters, norm "
                f"{norm_type:g}: the engine clips the 2-norm of all gradients; give it all of "
                "model.parameters()"
            )
        if self._has_left:
            raise PlanError(
                f"clip_grad_norm_ counts gradients of {self._beside()} parameters that the "
                "optimizer has not, so that its zero_grad() left them to add up; freeze these "
                "(requires_grad_(False)), or call model.zero_grad()"
            )
        if not self._waiting:
            return torch.zeros(())
        self.command("finish", self._factor())
        norm: Tensor = self.command("clip", float(max_norm))
        return norm

    def update(self, closure: Any = None) -> None:
        """Do what ``optimizer.step`` does."""
        if closure is not None:
            raise PlanError("optimizer.step(closure) evaluates the model in it; leave it out")
        if not self._waiting:
            if not self._is_cleared:
                raise PlanError(
                    "optimizer.step() without a backward since the update before, whose gradients "
                    "were not cleared; call backward before, or leave the step out"
                )
            return
        refuse_changes(self.optimizer, self._groups)
        self.command("finish", self._factor())
        self.command("update", options_of(self.optimizer))
        if self.reads_outputs is None:
            self.reads_outputs = False
        self.note_reads(call.made_beside_loss() for call in self._waiting)
        self._updated, self._waiting = self._waiting, []
        self._is_cleared = False
        self.updates += 1

    def note_reads(self, kept: Iterable[bool]) -> None:
        """Note that outputs are read beside the loss, where something is kept of some call."""
        self.reads_outputs = any(kept) or self.reads_outputs

    def note_kept(self) -> None:
        """Note so where outputs of the update before are still used when the next batch trains."""
        self.note_reads(call.has_outputs or call.made_beside_loss() for call in self._updated)
        self._updated = []

    def _beside(self) -> int:
        """Return how many parameters get gradients and no update."""
        own = {at for group in groups_of(self.optimizer) for at in group}
        return sum(1 for p in self.model.parameters() if p.requires_grad and id(p) not in own)

    def _has_gradients(self) -> bool:
        return not self._is_cleared or any(call.has_backward for call in self._waiting)

    def _factor(self) -> float:
        """Return by what the sum of the losses' gradients is multiplied in this update."""
        if not all(call.has_backward for call in self._waiting):
            raise PlanError(
                "the value of a loss was read and the loss had no backward before the update; call "
                "the model under torch.no_grad() and model.eval() to look at a loss"
            )
        factors = [call.factor for call in self._waiting]
        if not all(isclose(factor, factors[0], rel_tol=1e-12) for factor in factors):
            raise PlanError(
                f"losses of an update have different factors ({factors[0]:g} and "
                f"{next(f for f in factors if f != factors[0]):g}), and the engine adds up their "
                "gradients alike; give each call of the model the same factor"
            )
        return factors[0]

    def end(self) -> None:
        """Let the other ranks end: the script has ended."""
        assert self._ranks is not None, "the engine has begun"
        self._ranks.end()

    # -- values -------------------------------------------------------------------------

    def outputs(
        self, call: TrainingCall | EvaluationCall, numbers: Iterable[int], command: str
    ) -> dict[int, Tensor]:
        """Return outputs of a call by a forward of their own."""
        call.refuse_written()
        wanted = {number: call.source(number) for number in numbers}
        fetch = sorted(set().union(*(modules_in(source) for source in wanted.values())))
        leaves = self.leaves(call.args, call.kwargs, None)
        fetched = self.command(command, leaves, tuple(fetch)) if fetch else {}
        return {
            number: made_of(source, fetched, call.tensors).to(call.device)
            for number, source in wanted.items()
        }

    def refuse_second(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise PlanError for another optimizer that steps."""
        raise PlanError(
            f"a second optimizer ({type(optimizer).__name__}) trains beside the "
            f"{type(self.optimizer).__name__} of the {type(self.model).__name__}, which a plan "
            "trains; train another model in a script of its own, or with planner.apply"
        )


class _ModelCall:
    """A call of the model: what it was given, what it returns."""

    trains = False

    def __init__(
        self, loop: Loop, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._loop, self._outputs = loop, outputs
        self._at, self._known = loop.updates, dict[int, Tensor]()
        self.made: WeakSet[Any] = WeakSet()
        leaves = tree_leaves((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._given = AsGiven(self.tensors)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors):
            raise PlanError(
                "the model is called with a tensor that requires a gradient, which the engine does "
                "not compute: it has those of the model's own parameters; call it with "
                "tensor.detach(), or put what the gradient is for into the model's forward"
            )

    @property
    def device(self) -> torch.device:
        """That of the tensors that the model was given."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def named_inputs(self) -> dict[str, Any]:
        """Arguments by name."""
        return self._loop._named(self.args, self.kwargs)

    @property
    def outputs(self) -> Outputs:
        """What it returns."""
        return self._outputs

    def value(self, output: int) -> Tensor:
        """Return the value of an output."""
        if output not in self._known:
            self.need({output})
        return self._known[output]

    def need(self, outputs: set[int]) -> None:
        """Make the values of outputs."""
        raise NotImplementedError

    def source(self, output: int) -> Any:
        """Return what an output is made of; raise PlanError where that can't be told."""
        source = self._outputs.sources[output]
        if source is None:
            raise PlanError(
                f"the script reads {self._outputs.names[output]} of the model, which no module of "
                "it returns and which its forward computes with weights, or writes into; let "
                "forward return what a module of it returns"
            )
        return source

    def refuse_written(self) -> None:
        """Raise PlanError where a tensor that the model was given was written into since."""
        self._given.refuse_written()

    def _refuse_late(self) -> None:
        if self._loop.updates != self._at:
            raise PlanError(
                "the script reads what the model returned before an update of its weights; read "
                "it before optimizer.step()"
            )


class TrainingCall(_ModelCall):
    """A call in training. Mutable: its loss, once it ran, and the factor of it in the update."""

    trains = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._root: Tensor | None = None

    def is_known(self, output: int) -> bool:
        """Whether an output's value is there."""
        return output in self._known

    def value(self, output: int) -> Tensor:
        """Return the value of an output."""
        if output != self._outputs.loss:
            self._loop.reads_outputs = True
        value = super().value(output)
        return value if value is self._root else _guarded(value, _BESIDE)

    @property
    def has_outputs(self) -> bool:
        """Whether one of its outputs but the loss is still used by the script."""
        return any(
            isinstance(each.node, Output) and each.node.number != self._outputs.loss
            for each in self.made
        )

    def made_beside_loss(self) -> bool:
        """Whether the script still uses something that it made of outputs, and its loss has not."""
        notes = (each.node for each in self.made)
        return any(isinstance(node, Applied) and not node.is_of_loss for node in notes)

    @property
    def has_backward(self) -> bool:
        """Whether a backward of its loss came."""
        return self._root is not None and self._root.grad is not None

    @property
    def factor(self) -> float:
        """Which multiple of its loss's gradient the backwards so far add up to."""
        assert self._root is not None, "of a call that ran"
        assert self._root.grad is not None, "of a call that had a backward"
        return self._root.grad.item()

    def backward(self, loss: Pending, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Train on its batch, if that was not done, and note the factor of its loss."""
        if self._root is None:
            mark_of_loss(loss.node)
            self._run(loss_of(loss.node, self._outputs))
        value_of(loss.node).backward(*args, **kwargs)

    def need(self, outputs: set[int]) -> None:
        """Make outputs: the loss by a step, others with it or by a forward of their own."""
        self._refuse_late()
        loss = self._outputs.loss
        if self._root is None and loss is not None:
            self._run(loss_of(Output(self, loss, 0), self._outputs), also=outputs - {loss})
        missing = outputs - self._known.keys()
        if not missing:
            return
        if self._root is None:
            raise PlanError(
                f"the script reads {self._outputs.names[min(missing)]} of the model before the "
                "backward of a loss of it, and the engine computes both in one step; read it after "
                "loss.backward()"
            )
        self._loop.reads_outputs = True
        self._known |= self._loop.outputs(self, missing, "forward")

    def _run(self, loss: Loss, also: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        outputs = self._outputs
        self.refuse_written()
        self._loop.note_kept()
        wanted = set(also)
        if loss.node is not None and self._loop.reads_outputs is not False:
            # (Until a script has shown that it does not read them, it may.)
            wanted |= {output.number for output in loss.outputs if outputs.sources[output.number]}
        sources = {number: self.source(number) for number in wanted}
        fetch = sorted(set().union(*map(modules_in, sources.values())))
        value, fetched = self._loop.add(self, loss, fetch)
        self._root = value.detach().clone().to(self.device).requires_grad_()
        for number, source in sources.items():
            self._known[number] = made_of(source, fetched, self.tensors).to(self.device)
        if loss.node is None:
            assert outputs.loss is not None, "it is the loss"
            self._known[outputs.loss] = self._root
        else:
            loss.node.value = self._root


_IN_EVALUATION = "backward of what the model returned in evaluation mode; call model.train() before"
_BESIDE = (
    "a backward reaches what the model returned beside the loss that the engine trains on: that of "
    "the call's first backward, or the model's own where its value was read before; add all terms "
    "to one loss, and call backward of it before a value is read"
)


class _NoBackward(torch.autograd.Function):
    """A value; its backward is refused."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, value: list[Tensor], why: str) -> Tensor:
        ctx.why = why
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise PlanError(ctx.why)


def _guarded(value: Tensor, why: str) -> Tensor:
    """Return a value that requires a gradient, as in one process; a backward that reaches it is
    refused: the engine has made the gradients.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return value
    with torch.enable_grad():
        made: Tensor = _NoBackward.apply(torch.ones((), requires_grad=True), [value], why)
        return made


class EvaluationCall(_ModelCall):
    """A call that does not train: its outputs are made when they are first used."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._has_grad = torch.is_grad_enabled()

    def value(self, output: int) -> Tensor:
        """Return the value of an output; a backward that reaches it is refused."""
        value = super().value(output)
        return _guarded(value, _IN_EVALUATION) if self._has_grad else value

    def is_known(self, output: int) -> bool:
        """Whether an output's value is there, or made at once."""
        return True

    def backward(self, loss: Pending, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse: nothing trains here."""
        raise PlanError(_IN_EVALUATION)

    def need(self, outputs: set[int]) -> None:
        """Make outputs."""
        self._refuse_late()
        loss = self._outputs.loss
        if loss in outputs:
            assert loss is not None, "among the outputs"
            self.refuse_written()
            leaves = self._loop.leaves(self.args, self.kwargs, [])
            self._known[loss] = self._loop.command("evaluate_loss", leaves).to(self.device)
        if missing := outputs - self._known.keys():
            self._known |= self._loop.outputs(self, missing, "evaluate")


def call_as_batch(named: dict[str, Any], tree: Any, order: Sequence[str]) -> Any:
    """Return arguments of a call in the structure of a plan's batches: by name, or in their order.

    What is None is left out, where the plan has no place for it.
    """
    ((kind, items),) = tree.items()
    if kind == "dict":
        keys = {key for key, _ in items}
        return {name: v for name, v in named.items() if v is not None or name in keys}
    values = [named[name] for name in order if name in named]
    while values and values[-1] is None:
        values.pop()
    if kind == "tensor":
        return values[0] if len(values) == 1 else tuple(values)
    return tuple(values) if kind == "tuple" else list(values)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of param groups, without parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _told(value: Any) -> tuple[Any, ...]:
    """Return what of arguments an output's shape depends on."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in tree_leaves(value)
    )
