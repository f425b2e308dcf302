"""In-place writes made pure: later readers see a new tensor instead of a changed one.

A graph's values never change, so that stages, recomputation and microbatches in flight cannot
disturb each other. A write becomes its pure form, and later reads of the written tensor read
the result. Buffers outlive the forward: what is written into one is computed on a copy
of it and put back with one ``copy_``, as each forward leaves it for the next. A counter that
nothing else reads (`num_batches_tracked`) is written in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from planner.capture.diagnose import node_line
from planner.capture.reading.record import Recorder, is_view
from planner.errors import CaptureError
from planner.language.graph import Op, Ref, TensorMeta

Env = dict[torch.fx.Node, Any]

_FOLLOWED = ("slice", "select")
"""Views that writes are followed through: each has a pure form that puts a part into a whole."""


def pure_form(
    record: Recorder, node: torch.fx.Node, target: Any, args: Any
) -> tuple[Any, Any, Any]:
    """Return the pure form of an in-place op: its target, its args, and the tensor written.

    The target is None for a copy_ of an equal shape and dtype, whose value is simply its source.
    """
    written = args[0]
    if not isinstance(written, Ref) or record.tensors[written.name].kind not in (
        "activation",
        "buffer",
    ):
        raise CaptureError(
            f"the model writes in place into {getattr(written, 'name', written)}{node_line(node)}; "
            "write the out-of-place form (x = x + y)"
        )
    name = target._schema.name.split("::")[1].removesuffix("_")
    if name == "copy":
        old = record.tensors[written.name]
        new = record.tensors[args[1].name]
        if (old.shape, old.dtype) == (new.shape, new.dtype):
            return None, args, written
        return torch.ops.aten.copy.default, args, written
    pure = _of_arguments(target, name) or _of_arguments(target, f"{name}_functional")
    if pure is None:
        raise CaptureError(
            f"the in-place op {target}{node_line(node)} has no pure form; "
            "write the out-of-place form"
        )
    return pure, _with_defaults(target, pure, args, node.kwargs), written


def _with_defaults(target: Any, pure: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the args with what `target` takes where nothing is given and its pure form does not:
    `bernoulli_()` draws with p = 0.5, and `bernoulli.p` has no such default.
    """
    taken = [a for a in target._schema.arguments if not a.kwarg_only]
    pairs = list(zip(taken, pure._schema.arguments, strict=False))[len(args) :]
    differ = [a.default_value != b.default_value for a, b in pairs]
    # Up to the last that differs: arguments are given by their places.
    missing = [a for at, (a, _) in enumerate(pairs) if any(differ[at:])]
    return (*args, *(a.default_value for a in missing if a.name not in kwargs))


def _of_arguments(target: Any, name: str) -> Any:
    """Return the op of a name that takes what `target` takes, its ``out`` aside; None without."""

    def taken(op: Any) -> list[Any]:
        arguments = [(a.name, str(a.type)) for a in op._schema.arguments if a.name != "out"]
        # What is written is `self`, where the pure form has `input` (dropout) too.
        return [arguments[0][1], *arguments[1:]] if arguments else []

    packet = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else (getattr(packet, each) for each in packet.overloads())
    pure = (each for each in overloads if not any(a.is_out for a in each._schema.arguments))
    return next((each for each in pure if taken(each) == taken(target)), None)


def without_out(
    record: Recorder, node: torch.fx.Node, target: Any, args: Any, kwargs: Any
) -> tuple[Any, Any, Ref]:
    """Return an op that writes into its ``out`` without it: target, kwargs, the tensor written."""
    written = dict(kwargs).get("out")
    pure = _of_arguments(target, target._schema.name.split("::")[1])
    if pure is not None and isinstance(written, Ref):
        return pure, tuple((k, v) for k, v in kwargs if k != "out"), written
    raise CaptureError(
        f"the op {target}{node_line(node)} writes into tensors it is given; write the "
        "out-of-place form"
    )


def substitute(envs: Sequence[Env], old: Ref, new: Ref) -> None:
    """Make later readers of `old` read `new`."""
    _give(_holders(envs, old), new)


_Holders = tuple[tuple[Env, torch.fx.Node], ...]
"""Nodes whose value is one tensor, each with the values of its region."""


def _holders(envs: Sequence[Env], ref: Ref) -> _Holders:
    return tuple((env, key) for env in envs for key, held in env.items() if held == ref)


def _give(holders: _Holders, value: Ref) -> None:
    for env, key in holders:
        env[key] = value


def root_of(record: Recorder, written: Ref) -> Ref:
    """Return the tensor that a write into a view of it changes."""
    maker = record.maker.get(written.name)
    while maker is not None and is_view(maker.target) and isinstance(maker.args[0], Ref):
        written = maker.args[0]
        maker = record.maker.get(written.name)
    return written


def is_only_counted(node: torch.fx.Node) -> bool:
    """Whether a buffer is only ever written in place, and nothing reads it."""
    return all(
        isinstance(user.target, torch._ops.OpOverload)
        and user.target._schema.name.endswith("_")
        and user.args[0] is node
        and user.all_input_nodes == [node]
        and not user.users
        for user in node.users
    )


def rebind(
    record: Recorder,
    written: Ref,
    value: Ref,
    envs: Sequence[Env],
    node: torch.fx.Node,
    *,
    grad_enabled: bool,
    copies: Collection[str],
) -> tuple[Ref, Ref, Ref]:
    """Make later uses of a tensor written in place, and of its base, see `value`.

    Returns the tensor that was written in the end, which is no view, what it is from now on, and
    what `written` is from now on: where it is used again, a view of that, so that another write
    through it is followed, too. `envs` are those of the region the op stands in and of all around
    it, `copies` the names of what buffers are put back from. Raises CaptureError for a write that
    autograd would treat in a way a pure op can't: one without gradient into a tensor that has one.
    """
    levels: list[_Level] = []
    result = value
    while True:
        before = record.tensors[written.name]
        # Autograd would keep the gradient of the old values; a pure form under no_grad drops it.
        if before.requires_grad and not grad_enabled:
            raise CaptureError(
                f"the model writes in place{node_line(node)} without gradient into a tensor that "
                "has one; write the out-of-place form, with detach() where no gradient is meant"
            )
        # Other views of the same memory would see the write in PyTorch, and a pure op's do not.
        record.stale.update(record.views_of(written.name) - {value.name})
        maker = record.maker.get(written.name)
        # Noted before names are given away: these nodes are to read a view of the result again.
        level = _Level(before, maker, _holders(envs, written))
        levels.append(level)
        _give(level.holders, value)
        if maker is None or not is_view(maker.target):
            break
        packet = maker.target.split(".")[1]
        if packet not in _FOLLOWED:
            root = root_of(record, written)
            whole = record.tensors[root.name]
            if (
                whole.kind != "activation"
                or root.name in copies
                or (whole.requires_grad and not grad_enabled)
            ):
                raise CaptureError(
                    f"the model writes in place through {packet}{node_line(node)}; only writes "
                    "through slices and indices can be followed; write the out-of-place form"
                )
            # Nothing is lost where nothing reads the tensor behind the view any more.
            record.stale.update({root.name} | record.views_of(root.name))
            break
        base = maker.args[0]
        assert isinstance(base, Ref)
        meta = record.tensors[base.name]
        fresh = record.fresh(f"{base.name}_written")
        record.tensors[fresh] = TensorMeta(
            name=fresh,
            shape=meta.shape,
            dtype=meta.dtype,
            kind="activation",
            requires_grad=meta.requires_grad or record.tensors[value.name].requires_grad,
        )
        # The whole with the written part in its place: the pure form of a write through a view.
        scatter = f"aten.{packet}_scatter.default"
        record.emit(node, scatter, fresh, (base, value, *maker.args[1:]), (), (fresh,))
        written, value = base, Ref(fresh)
    return written, value, _views_again(record, value, levels, node) or result


@dataclass(frozen=True)
class _Level:
    """A tensor that a write went through, on its way from a view to what that is a view of."""

    meta: TensorMeta
    maker: Op | None
    holders: _Holders
    """Nodes whose value it was."""

    def is_used_after(self, node: torch.fx.Node) -> bool:
        """Whether a node after the write reads it."""
        users = (user for _, key in self.holders for user in key.users)
        return any(user.graph is not node.graph or user > node for user in users)


def _views_again(
    record: Recorder, whole: Ref, levels: Sequence[_Level], node: torch.fx.Node
) -> Ref | None:
    """Take the views that a write went through again, of what was written, as far as they are used
    after it; return the last one, that of the write itself, or None where it is not taken.
    """
    views = levels[:-1]
    # Only views that a later op reads are taken again.
    used = [level.is_used_after(node) for level in views]
    if views and node.users:
        used[0] = True
    if not any(used):
        return None
    # From the base towards the written view; views that only lead to unused ones are left out.
    for level in reversed(views[used.index(True) :]):
        assert level.maker is not None
        name = record.fresh(f"{level.meta.name}_again")
        requires_grad = record.tensors[whole.name].requires_grad
        record.tensors[name] = replace(level.meta, name=name, requires_grad=requires_grad)
        record.emit(
            node,
            level.maker.target,
            name,
            (whole, *level.maker.args[1:]),
            level.maker.kwargs,
            (name,),
        )
        whole = Ref(name)
        _give(level.holders, whole)
    return whole if used[0] else None
