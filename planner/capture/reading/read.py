"""An ExportedProgram → our ops."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.capture.checks.functions import FunctionCall
from planner.capture.checks.stays_on_meta import OnMeta
from planner.capture.diagnose import node_line
from planner.capture.opaque import ModuleCall, OpaqueModules, Place
from planner.capture.reading.record import READ_DETACHED, Exported, Recorder, is_composite, is_view
from planner.capture.reading.sparse import dense_where_mixed
from planner.capture.reading.writes import (
    Env,
    is_only_counted,
    pure_form,
    rebind,
    root_of,
    substitute,
    without_out,
)
from planner.errors import CaptureError
from planner.language.graph import Op, Ref, Symbol, TensorMeta, map_refs
from planner.language.graph.function_keys import AUTOGRAD_FUNCTION
from planner.language.graph.module_keys import OPAQUE_MODULE

# Values of small constants made inside forward are kept in the graph; larger ones are
# almost always weights that were not registered.
MAX_CONSTANT_NUMEL = 4096

_ARITHMETIC = ("_operator", "operator", "math", "builtins")
"""Modules whose functions a capture computes: those of numbers."""

_DROPPED = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}


class _BufferWritten(Exception):
    """A buffer turns out to be written, after ops that read it were noted; not an error."""


class _MemoryWritten(Exception):
    """A tensor turns out to be written whose copy was taken for itself, or a view of itself for a
    copy; not an error.
    """


class Reader:
    """Turns an ExportedProgram into our ops: names kept, submodules of grad and autocast
    regions inlined, asserts and no-op aliases dropped, in-place ops made pure.

    Mutable: it grows while it reads. `_envs` are the values of the region being read and of
    those around it; `_written` names the buffers that the forward writes and reads; `_copies`
    says of which of them a tensor is the value now, `_puts` where to put the last one back.
    Copies are the tensors themselves, and a dropout of nothing is a copy, which is the same as long
    as no such memory, in `_inexact`, is written in place; else `_is_exact`, and all is read again.
    `_composites` are ops made of others, which may return views and do not say so.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        module: torch.nn.Module,
        paths: tuple[str, ...],
        *,
        made: OnMeta,
        calls: Sequence[FunctionCall],
        modules: OpaqueModules,
        reached: Collection[str],
    ):
        """`calls` are those of autograd functions, in the order in which ops number them, and
        `modules` has those of opaque modules; `reached` names the parameters that a gradient
        reaches.
        """
        self.program, self.module, self.paths, self.made = program, module, paths, made
        self.calls, self.modules, self.reached = calls, modules, reached
        self._written: set[str] = set()
        self._is_exact = False

    def read(self) -> Exported:
        """Read the whole program. Raises CaptureError for what can't be planned."""
        while True:
            self.record = Recorder()
            self.inputs: list[str] = []
            self._envs: list[Env] = []
            self._grad_enabled = True
            self._copies: dict[str, str] = {}
            self._puts: dict[str, tuple[int, torch.fx.Node, Ref]] = {}
            self._counters: set[str] = set()
            self._detached: dict[Ref, Ref] = {}
            self._inexact: set[str] = set()
            self._composites: list[tuple[torch.fx.Node, Op]] = []
            env = self._placeholders()
            try:
                outputs = self._run(self.program.graph_module, env)
            except _BufferWritten as found:
                # Ops before the write have read the buffer itself, and have to read a copy of it:
                # read all again.
                self._written.add(str(found))
                continue
            except _MemoryWritten:
                self._is_exact = True
                continue
            break
        self._put_back()
        self.record.ops[:] = dense_where_mixed(self.record.ops, self.record.tensors)
        (loss,) = outputs
        if not isinstance(loss, Ref):
            raise CaptureError("the model's loss does not depend on any op; return a computed loss")
        self._check_gradients(loss)
        return Exported(
            tensors=self.record.tensors,
            inputs=tuple(self.inputs),
            ops=tuple(self.record.ops),
            loss=loss.name,
            lines=tuple(self.record.lines),
        )

    def _check_gradients(self, loss: Ref) -> None:
        """Raise where a parameter has a gradient in the model and none in the ops read of it."""
        # Ops from the last to the first: what a reached tensor is made of is reached.
        reached = {loss.name}
        for raw in reversed(self.record.ops):
            if reached.intersection(raw.op.outputs):
                # Through tensors that carry a gradient, as autograd would.
                reached |= {n for n in raw.op.inputs if self.record.tensors[n].requires_grad}
        for meta in self.record.tensors.values():
            if meta.kind == "param" and meta.requires_grad and meta.name not in reached:
                raise CaptureError(
                    f"the gradient of parameter {meta.fqn} would be lost in capture; please report "
                    "this model, and freeze the parameter if it is not meant to train"
                )

    # -- inputs -------------------------------------------------------------------------

    def _placeholders(self) -> dict[torch.fx.Node, Any]:
        kinds = torch.export.graph_signature.InputKind
        aliases: dict[int, list[str]] = {}
        for fqn, param in self.module.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(param), []).append(fqn)
        tied = {fqn: tuple(group) for group in aliases.values() for fqn in group}
        env: Env = {}
        seen: dict[str, str] = {}
        user_paths = iter(self.paths)
        nodes = [n for n in self.program.graph_module.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(nodes, self.program.graph_signature.input_specs, strict=True):
            fqn = (spec.target or "").removeprefix("user.")
            if spec.kind == kinds.PARAMETER:
                group = tied.get(fqn, (fqn,))
                if group[0] in seen:  # export lists a tied parameter once per name
                    env[node] = Ref(seen[group[0]])
                    continue
                seen[group[0]] = node.name
                self.record.tensor(
                    node.name,
                    node.meta["val"],
                    kind="param",
                    fqn=group[0],
                    aliases=group[1:],
                    requires_grad=group[0] in self.reached,
                )
            elif spec.kind == kinds.BUFFER:
                self.record.tensor(node.name, node.meta["val"], kind="buffer", fqn=fqn)
                if is_only_counted(node):
                    self._counters.add(node.name)
            elif spec.kind == kinds.CONSTANT_TENSOR:
                self._constant(node, spec.target, fqn)
            elif spec.kind == kinds.USER_INPUT:
                path = next(user_paths)
                self.record.tensor(node.name, node.meta["val"], kind="input", fqn=path)
                self.inputs.append(node.name)
            else:
                raise CaptureError(
                    f"the model takes an input of kind {spec.kind.name}; use tensors"
                )
            env[node] = Ref(node.name)
        return env

    def _constant(self, node: torch.fx.Node, target: str, fqn: str) -> None:
        """A tensor used in forward that is no parameter or buffer."""
        value = self.program.constants[target]
        try:  # an attribute of the user's module: its values are read when the plan runs
            held = operator.attrgetter(fqn)(self.module)
        except AttributeError:
            held = None
        if isinstance(held, torch.Tensor):
            self.record.tensor(node.name, node.meta["val"], kind="constant", fqn=fqn)
            return
        known = self.made.values_of(value)
        value = value if known is None else known
        if value.numel() > MAX_CONSTANT_NUMEL or (value.is_meta and value.numel()):
            raise CaptureError(
                f"forward makes a constant tensor of shape {tuple(value.shape)} whose values can't "
                f"be kept (up to {MAX_CONSTANT_NUMEL} elements are); register it with "
                "self.register_buffer in __init__"
            )
        data = tuple(value.flatten().tolist()) if value.numel() else ()
        self.record.tensor(node.name, node.meta["val"], kind="constant", data=data)

    # -- ops ----------------------------------------------------------------------------

    def _run(self, graph_module: torch.fx.GraphModule, env: Env) -> tuple:
        self._envs.append(env)
        try:
            return self._read_nodes(graph_module, env)
        finally:
            self._envs.pop()

    def _read_nodes(self, graph_module: torch.fx.GraphModule, env: Env) -> tuple:
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return self._arg(node.args[0], env)
            if node.op == "get_attr":
                target = getattr(graph_module, node.target)
                env[node] = target
            elif node.target is operator.getitem:
                env[node] = env[node.args[0]][node.args[1]]
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                env[node] = self._inline(node, env)
            elif isinstance(node.target, torch._ops.OpOverload):
                env[node] = self._op(node, env)
            elif getattr(node.target, "__module__", "") in _ARITHMETIC:
                env[node] = node.target(*(self._arg(a, env) for a in node.args))
            else:
                _refuse_op(getattr(node.target, "__name__", str(node.target)), node)
        raise AssertionError("an FX graph without an output")

    def _inline(self, node: torch.fx.Node, env: Env) -> Any:
        assert isinstance(node.target, torch._ops.HigherOrderOperator)
        name = node.target.name()
        args = list(node.args)
        if name == "wrap_with_set_grad_enabled":
            enabled, submodule, operands = args[0], args[1], args[2:]
        elif name == "wrap_with_autocast" and not args[2]:
            enabled, submodule, operands = self._grad_enabled, args[4], args[5:]
        elif "autocast" in name:
            raise CaptureError(
                f"the model uses {name}{node_line(node)}, which can't be planned; leave autocast "
                "out: precision is the plan's choice"
            )
        else:
            _refuse_op(name, node)
        assert isinstance(submodule, torch.fx.Node)
        inner = env[submodule]
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        inner_env = {
            p: self._arg(operand, env) for p, operand in zip(placeholders, operands, strict=True)
        }
        around = self._grad_enabled, self._detached
        # A tensor is detached once for a region: outside it, its gradient flows.
        self._grad_enabled, self._detached = bool(enabled), {}
        results = self._run(inner, inner_env)
        self._grad_enabled, self._detached = around
        return results

    def _without_gradient(
        self, node: torch.fx.Node, args: Any, kwargs: Any, env: Env
    ) -> tuple[Any, Any]:
        """Detach what an op of a no_grad region reads.

        What it writes into stays as it is. So does what it returns itself, as `x.contiguous()`
        returns a contiguous x: its gradient flows on, without gradient mode, too.
        """
        assert isinstance(node.target, torch._ops.OpOverload)
        arguments = node.target._schema.arguments
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        returned = {env[argument] for argument in _returned_inputs(node)}

        def detached(name: str, value: Any) -> Any:
            if name in written:
                return value
            return map_refs(value, lambda r: r if r in returned else self._detach(r, node))

        return (
            tuple(detached(a.name, arg) for a, arg in zip(arguments, args, strict=False)),
            tuple((name, detached(name, value)) for name, value in kwargs),
        )

    def _detach(self, ref: Ref, node: torch.fx.Node) -> Ref:
        meta = self.record.tensors[ref.name]
        if not meta.requires_grad:
            return ref
        if ref in self._detached:
            return self._detached[ref]
        name = self.record.fresh(f"{ref.name}_detached")
        self.record.tensors[name] = TensorMeta(
            name=name, shape=meta.shape, dtype=meta.dtype, kind="activation"
        )
        self.record.emit(node, "aten.detach.default", name, (ref,), (), (name,))
        self._detached[ref] = Ref(name)
        return Ref(name)

    def _op(self, node: torch.fx.Node, env: Env) -> Any:
        target: torch._ops.OpOverload = node.target  # type: ignore[assignment]
        packet = target._schema.name.split("::")[1]
        if packet in _DROPPED:
            return None
        self._copy_written_buffers(node, env)
        args = self._arg(node.args, env)
        kwargs = tuple((k, self._arg(v, env)) for k, v in node.kwargs.items())
        if not self._grad_enabled or packet in READ_DETACHED:
            args, kwargs = self._without_gradient(node, args, kwargs, env)
        if packet in ("alias", "lift_fresh_copy", "lift_fresh"):
            return args[0]
        if packet == "detach_":
            detached = self._detach(args[0], node)
            substitute(self._envs, args[0], detached)
            return detached
        if packet == "autograd_function":
            return self._function(node, self.calls[args[1]], args[0])
        if packet == "opaque_module":
            return self._module(node, self.modules.calls[args[1]], args[0])
        if packet == "to":
            # A move between devices means nothing here; only the dtype matters.
            dtype = next(
                (a for a in (*args[1:], *(v for _, v in kwargs)) if _is_dtype(a)),
                None,
            )
            if dtype is None:
                names = (argument.name for argument in target._schema.arguments)
                given = dict(zip(names, args, strict=False)) | dict(kwargs)
                return self._copied(node, args[0]) if given.get("copy") else args[0]
            target, args, kwargs = torch.ops.aten.to.dtype, (args[0], dtype), ()
        if packet == "cat":
            # (torch.cat passes over tensors of shape [0], whatever the rank of the others.)
            parts = tuple(part for part in args[0] if self.record.tensors[part.name].shape != (0,))
            if len(parts) == 1:
                return self._copied(node, parts[0])
            args = (parts, *args[1:])
        if packet == "histc" and "int" in self.record.tensors[args[0].name].dtype:
            return portable_histc(self.record, node, target, args, kwargs)
        may_view_inputs = is_composite(target) and not is_view(str(target))
        if self._is_exact and may_view_inputs and (returned := _returned_input(node)):
            return env[returned]  # a dropout of 0, a cast to the same dtype
        written: Ref | None = None
        if target._schema.is_mutable and not _is_counted(args, self._counters):
            if packet.endswith("_"):
                target, args, written = pure_form(self.record, node, target, args)
                if packet in READ_DETACHED:
                    args = (self._detach(args[0], node), *args[1:])
            else:
                target, kwargs, written = without_out(self.record, node, target, args, kwargs)
            if self.record.tensors[root_of(self.record, written).name].kind == "buffer":
                raise _BufferWritten(root_of(self.record, written).name)
            if target is None:  # a copy that only replaces: its source is the new value
                return self._rebind(node, written, self._copied(node, args[1]))
        values = node.meta["val"]
        many = isinstance(values, tuple | list)
        grad = self.record.needs_grad(packet, args, kwargs)
        outputs = []
        for index, value in enumerate(values if many else (values,)):
            if packet == "broadcast_tensors":  # each output is a view of its own input
                grad = self.record.needs_grad(packet, args[0][index], kwargs)
            name = self.record.fresh(f"{node.name}.{index}" if many else node.name)
            self.record.tensor(
                name,
                value,
                kind="activation",
                requires_grad=grad and (value.is_floating_point() or value.is_complex()),
            )
            outputs.append(name)
        if written is not None:
            self._emit_written(node, target, outputs[0], args, kwargs)
            return self._rebind(node, written, Ref(outputs[0]))
        op = self.record.emit(node, str(target), outputs[0], args, kwargs, tuple(outputs))
        if may_view_inputs:
            self._composites.append((node, op))
        return tuple(Ref(o) for o in outputs) if many else Ref(outputs[0])

    # -- writes -------------------------------------------------------------------------

    def _emit_written(
        self, node: torch.fx.Node, target: Any, name: str, args: Any, kwargs: Any
    ) -> None:
        """Note the pure form of a write. What is written keeps its dtype, whatever the operands'
        is: the pure op's own result may need a cast.
        """
        meta = self.record.tensors[name]
        computed = _on_meta(target, args, kwargs, self.record.tensors)
        if tuple(computed.shape) != meta.shape:
            raise CaptureError(
                f"the model writes a result of shape {tuple(computed.shape)} into a tensor of "
                f"shape {meta.shape}{node_line(node)}; write the out-of-place form"
            )
        dtype = str(computed.dtype).removeprefix("torch.")
        if dtype == meta.dtype:
            self.record.emit(node, str(target), name, args, kwargs, (name,))
            return
        uncast = self.record.fresh(f"{name}_{dtype}")
        self.record.tensors[uncast] = replace(meta, name=uncast, dtype=dtype)
        self.record.emit(node, str(target), uncast, args, kwargs, (uncast,))
        cast = (Ref(uncast), Symbol("dtype", meta.dtype))
        self.record.emit(node, "aten.to.dtype", name, cast, (), (name,))

    def _copied(self, node: torch.fx.Node, source: Ref) -> Ref:
        """Return a copy: the tensor itself, unless either is written in place later."""
        if not self._is_exact:
            self._inexact.add(source.name)
            return source
        return self._clone(node, source, f"{source.name}_copied")

    def _clone(self, node: torch.fx.Node, source: Ref, name: str) -> Ref:
        """Note an op that copies a tensor, and return the copy, of a name like this."""
        meta = self.record.tensors[source.name]
        name = self.record.fresh(name)
        self.record.tensors[name] = TensorMeta(
            name=name,
            shape=meta.shape,
            dtype=meta.dtype,
            kind="activation",
            requires_grad=meta.requires_grad,
        )
        self.record.emit(node, "aten.clone.default", name, (source,), (), (name,))
        return Ref(name)

    def _rebind(self, node: torch.fx.Node, written: Ref, value: Ref) -> Ref:
        """Let later ops read what was written; return what the op itself returns."""
        memory = root_of(self.record, written).name
        # What was taken for a copy shares this memory in the graph; read again with true copies.
        names = {memory, *self.record.views_of(memory)}
        if self._inexact.intersection(names):
            raise _MemoryWritten
        for maker, op in self._composites:
            if not names.intersection((*op.inputs, *op.outputs)):
                continue
            if _returned_input(maker):
                raise _MemoryWritten
            # An einsum of a single operand, a meshgrid: views of what they are given.
            if _views_inputs(maker):
                raise CaptureError(
                    f"the model writes in place{node_line(node)} into memory that the result of "
                    f"{maker.target}{node_line(maker)} shares; write the out-of-place form"
                )
        root, whole, result = rebind(
            self.record,
            written,
            value,
            self._envs,
            node,
            grad_enabled=self._grad_enabled,
            copies=self._copies,
        )
        buffer = self._copies.get(root.name)
        if buffer is not None:
            if self.record.tensors[whole.name].requires_grad:
                raise CaptureError(
                    f"the model writes a value that has a gradient into buffer "
                    f"{self.record.tensors[buffer].fqn}{node_line(node)}; detach() it first"
                )
            self._copies[whole.name] = buffer
            # (The last write of the buffer decides, and where it stands.)
            self._puts[buffer] = (len(self.record.ops), node, whole)
        return result

    def _copy_written_buffers(self, node: torch.fx.Node, env: Env) -> None:
        """Let an op read a copy of a buffer that the forward writes.

        The buffer itself changes when the next microbatch is run, perhaps before this one's
        backward reads what it kept.
        """
        for argument in node.all_input_nodes:
            held = env.get(argument)
            if isinstance(held, Ref) and held.name in self._written:
                copy = self._clone(node, held, f"{held.name}_now")
                self._copies[copy.name] = held.name
                substitute(self._envs, held, copy)

    def _put_back(self) -> None:
        """Note, after the last write of each buffer, the copy that the next forward finds."""
        # The last position first: an insertion leaves the positions before it as they are.
        for buffer, (position, node, value) in sorted(
            self._puts.items(), key=lambda put: put[1][0], reverse=True
        ):
            meta = self.record.tensors[buffer]
            name = self.record.fresh(f"{buffer}_kept")
            self.record.tensors[name] = TensorMeta(
                name=name, shape=meta.shape, dtype=meta.dtype, kind="activation"
            )
            self.record.emit(
                node, "aten.copy_.default", name, (Ref(buffer), value), (), (name,), at=position
            )

    def _function(
        self, node: torch.fx.Node, call: FunctionCall, tensors: tuple[Ref, ...]
    ) -> tuple[Ref, ...]:
        """Note a call of an autograd function as an op of its own key and arguments."""
        given = iter(tensors)
        other = next((arg for arg in call.args if isinstance(arg, dict | set)), None)
        if other is not None:
            raise CaptureError(
                f"the autograd function {call.key.partition('@')[0]}{node_line(node)} is given a "
                f"{type(other).__name__}, which a plan can't hold; pass tensors, numbers and lists "
                "of them"
            )
        args = tuple(
            next(given) if isinstance(arg, torch.Tensor) else self._arg(arg, {})
            for arg in call.args
        )
        values = node.meta["val"]
        differentiable = [
            (value.is_floating_point() or value.is_complex())
            and index not in call.not_differentiable
            for index, value in enumerate(values)
        ]
        return self._users_code(node, AUTOGRAD_FUNCTION, (call.key, *args), tensors, differentiable)

    def _module(
        self, node: torch.fx.Node, call: ModuleCall, tensors: tuple[Ref, ...]
    ) -> tuple[Ref, ...]:
        """Note a call of an opaque module as an op of its own key and arguments."""

        def placed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(placed(item) for item in value)
            return tensors[value.index] if isinstance(value, Place) else value

        results = tuple(
            (r.shape, Symbol("dtype", str(r.dtype).removeprefix("torch.")), r.is_differentiable)
            for r in call.results
        )
        args = (
            call.key,
            self.modules.precision,
            call.holds_samples,
            (call.cost.forward, call.cost.backward),
            results,
            placed(call.args),
            placed(call.kwargs),
            tensors[call.num_given :],
        )
        differentiable = [result.is_differentiable for result in call.results]
        return self._users_code(node, OPAQUE_MODULE, args, tensors, differentiable)

    def _users_code(
        self,
        node: torch.fx.Node,
        target: str,
        args: tuple[Any, ...],
        tensors: tuple[Ref, ...],
        differentiable: Sequence[bool],
    ) -> tuple[Ref, ...]:
        """Note an op that runs code of the user's, and its results."""
        needs_grad = any(self.record.tensors[ref.name].requires_grad for ref in tensors)
        outputs = []
        for index, (value, has_grad) in enumerate(
            zip(node.meta["val"], differentiable, strict=True)
        ):
            name = self.record.fresh(f"{node.name}.{index}")
            self.record.tensor(
                name, value, kind="activation", requires_grad=needs_grad and has_grad
            )
            outputs.append(name)
        self.record.emit(node, target, outputs[0], args, (), tuple(outputs))
        return tuple(map(Ref, outputs))

    def _arg(self, arg: Any, env: Env) -> Any:
        if isinstance(arg, torch.fx.Node):
            return env[arg]
        if isinstance(arg, tuple | list):
            return tuple(self._arg(a, env) for a in arg)
        if isinstance(arg, torch.dtype):
            return Symbol("dtype", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.device):
            return Symbol("device")
        if isinstance(arg, torch.layout):
            return Symbol("layout", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.memory_format):
            return Symbol("memory_format", str(arg).removeprefix("torch."))
        if isinstance(arg, complex):
            return Symbol("complex", str(arg))
        if arg is None or isinstance(arg, bool | int | float | str | Ref):
            return arg
        raise CaptureError(f"an op takes an argument of type {type(arg).__name__}; use tensors")


def portable_histc(
    record: Recorder, node: torch.fx.Node, target: Any, args: Any, kwargs: Any
) -> Ref:
    """Count integers through float32, which is exact below 2**24 and runs on every device.

    Models choose integer histc off the CPU, and capture runs off the CPU; the plan may not.
    """
    source, counts = record.tensors[args[0].name], node.meta["val"]
    names = [record.fresh(f"{node.name}_{part}") for part in ("in", "float")]
    shapes = (source.shape, tuple(counts.shape))
    for name, shape in zip(names, shapes, strict=True):
        record.tensors[name] = TensorMeta(
            name=name, shape=shape, dtype="float32", kind="activation"
        )
    out = record.fresh(node.name)
    record.tensor(out, counts, kind="activation")
    cast, back = Symbol("dtype", "float32"), Symbol("dtype", record.tensors[out].dtype)
    to = "aten.to.dtype"
    record.emit(node, to, names[0], (args[0], cast), (), (names[0],))
    record.emit(node, str(target), names[1], (Ref(names[0]), *args[1:]), kwargs, (names[1],))
    record.emit(node, to, out, (Ref(names[1]), back), (), (out,))
    return Ref(out)


def _refuse_op(name: str, node: torch.fx.Node) -> NoReturn:
    raise CaptureError(
        f"the model uses {name}{node_line(node)}, which can't be planned; use plain tensor "
        "operations"
    )


def _returned_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that an op returns themselves: neither a copy of them nor a view."""
    results = _run_again(node)
    return [n for n in node.all_input_nodes if any(each is n.meta.get("val") for each in results)]


def _returned_input(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor that an op of a single result returns itself, if it does."""
    single = isinstance(node.meta["val"], torch.Tensor)
    return next(iter(_returned_inputs(node)), None) if single else None


def _views_inputs(node: torch.fx.Node) -> bool:
    """Whether a result of an op lies in the memory of what it is given."""
    given = [n.meta.get("val") for n in node.all_input_nodes]
    memory = {t.untyped_storage()._cdata for t in given if isinstance(t, FakeTensor)}
    return any(result.untyped_storage()._cdata in memory for result in _run_again(node))


def _run_again(node: torch.fx.Node) -> Sequence[Any]:
    """Return what an op returns for the tensors without values that it is given; nothing for ops
    that write, and for our own.
    """
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), FakeTensor)]
    schema = node.target._schema  # type: ignore[union-attr]
    if not inputs or schema.is_mutable or schema.name.startswith("planner::"):
        return ()
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with inputs[0].meta["val"].fake_mode, torch.no_grad():
        results = node.target(*args, **kwargs)  # type: ignore[operator]
    return results if isinstance(results, tuple | list) else (results,)


def _is_counted(args: Any, counters: Collection[str]) -> bool:
    """Whether an op writes into a buffer that nothing reads."""
    return bool(args) and isinstance(args[0], Ref) and args[0].name in counters


def _on_meta(
    target: Any, args: Any, kwargs: Any, tensors: Mapping[str, TensorMeta]
) -> torch.Tensor:
    """Run an op for the shape and dtype of its result."""

    def plain(arg: Any) -> Any:
        if isinstance(arg, Ref):
            meta = tensors[arg.name]
            return torch.empty(meta.shape_at(1), dtype=getattr(torch, meta.dtype), device="meta")
        if isinstance(arg, Symbol):
            return arg.constant(torch, torch.device("meta"))
        return [plain(item) for item in arg] if isinstance(arg, tuple) else arg

    result: torch.Tensor = target(*map(plain, args), **{k: plain(v) for k, v in kwargs})
    return result


def _is_dtype(arg: Any) -> bool:
    return isinstance(arg, Symbol) and arg.kind == "dtype"
