"""An ExportedProgram → our ops."""

from __future__ import annotations

import operator
from typing import Any

import torch

from planner.capture.diagnose import node_line
from planner.capture.on_meta import OnMeta
from planner.capture.record import Exported, Recorder
from planner.capture.writes import pure_form, rebind
from planner.errors import CaptureError
from planner.graph import Ref, Symbol, TensorMeta

# Values of small constants made inside forward are kept in the graph; larger ones are
# almost always weights that were not registered.
MAX_CONSTANT_NUMEL = 4096

_DROPPED = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}


class Reader:
    """Turns an ExportedProgram into our ops: names kept, submodules of grad and autocast
    regions inlined, asserts and no-op aliases dropped, in-place activation ops made pure.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        module: torch.nn.Module,
        paths: tuple[str, ...],
        made: OnMeta,
    ):
        self.program, self.module, self.paths, self.made = program, module, paths, made
        self.record = Recorder()
        self.inputs: list[str] = []

    def read(self) -> Exported:
        """Read the whole program. Raises CaptureError for what can't be planned."""
        env = self._placeholders()
        outputs = self._run(self.program.graph_module, env)
        (loss,) = outputs
        if not isinstance(loss, Ref):
            raise CaptureError("the model's loss does not depend on any op; return a computed loss")
        return Exported(
            tensors=self.record.tensors,
            inputs=tuple(self.inputs),
            ops=tuple(self.record.ops),
            loss=loss.name,
            lines=tuple(self.record.lines),
        )

    # -- inputs -------------------------------------------------------------------------

    def _placeholders(self) -> dict[torch.fx.Node, Any]:
        kinds = torch.export.graph_signature.InputKind
        aliases: dict[int, list[str]] = {}
        for fqn, param in self.module.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(param), []).append(fqn)
        tied = {fqn: tuple(group) for group in aliases.values() for fqn in group}
        frozen = {f for f, p in self.module.named_parameters() if not p.requires_grad}
        env: dict[torch.fx.Node, Any] = {}
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
                    requires_grad=group[0] not in frozen,
                )
            elif spec.kind == kinds.BUFFER:
                self.record.tensor(node.name, node.meta["val"], kind="buffer", fqn=fqn)
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

    def _run(self, graph_module: torch.fx.GraphModule, env: dict[torch.fx.Node, Any]) -> tuple:
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
            else:
                env[node] = node.target(*(self._arg(a, env) for a in node.args))
        raise AssertionError("an FX graph without an output")

    def _inline(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        assert isinstance(node.target, torch._ops.HigherOrderOperator)
        name = node.target.name()
        args = list(node.args)
        if name == "wrap_with_set_grad_enabled":
            enabled, submodule, operands = args[0], args[1], args[2:]
        elif name == "wrap_with_autocast" and not args[2]:
            enabled, submodule, operands = True, args[4], args[5:]
        else:
            raise CaptureError(
                f"the model uses {name}{node_line(node)}, which can't be planned; "
                + (
                    "leave autocast out: precision is the plan's choice"
                    if "autocast" in name
                    else "write it with plain tensor operations"
                )
            )
        assert isinstance(submodule, torch.fx.Node)
        inner = env[submodule]
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        inner_env = {
            p: self._arg(operand, env) for p, operand in zip(placeholders, operands, strict=True)
        }
        results = self._run(inner, inner_env)
        if enabled:
            return results
        return tuple(self._detach(r, node) if isinstance(r, Ref) else r for r in results)

    def _detach(self, ref: Ref, node: torch.fx.Node) -> Ref:
        meta = self.record.tensors[ref.name]
        if not meta.requires_grad:
            return ref
        name = self.record.fresh(f"{ref.name}_detached")
        self.record.tensors[name] = TensorMeta(
            name=name, shape=meta.shape, dtype=meta.dtype, kind="activation"
        )
        self.record.emit(node, "aten.detach.default", name, (ref,), (), (name,))
        return Ref(name)

    def _op(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        target: torch._ops.OpOverload = node.target  # type: ignore[assignment]
        packet = target._schema.name.split("::")[1]
        if packet in _DROPPED:
            return None
        args = self._arg(node.args, env)
        kwargs = tuple((k, self._arg(v, env)) for k, v in node.kwargs.items())
        if packet in ("detach_", "alias", "lift_fresh_copy", "lift_fresh"):
            return args[0]
        if packet == "to":
            # A move between devices means nothing here; only the dtype matters.
            dtype = next(
                (a for a in (*args[1:], *(v for _, v in kwargs)) if _is_dtype(a)),
                None,
            )
            if dtype is None:
                return args[0]
            target, args, kwargs = torch.ops.aten.to.dtype, (args[0], dtype), ()
        if packet == "cat":
            parts = tuple(part for part in args[0] if self.record.tensors[part.name].shape != (0,))
            if len(parts) == 1:
                return parts[0]
            args = (parts, *args[1:])
        if packet == "histc" and "int" in self.record.tensors[args[0].name].dtype:
            return portable_histc(self.record, node, target, args, kwargs)
        written: Ref | None = None
        if target._schema.is_mutable and packet.endswith("_"):
            target, args, written = pure_form(self.record, node, target, args)
            if target is None:  # a copy that only replaces: its source is the new value
                rebind(self.record, written, args[1], env, node)
                return args[1]
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
        self.record.emit(node, str(target), outputs[0], args, kwargs, tuple(outputs))
        result = tuple(Ref(o) for o in outputs) if many else Ref(outputs[0])
        if written is not None and isinstance(result, Ref):
            rebind(self.record, written, result, env, node)
        return result

    def _arg(self, arg: Any, env: dict[torch.fx.Node, Any]) -> Any:
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


def _is_dtype(arg: Any) -> bool:
    return isinstance(arg, Symbol) and arg.kind == "dtype"
