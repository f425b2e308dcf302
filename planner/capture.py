"""Capture: an unmodified nn.Module and two example batches → ModelGraph.

The module is exported on the meta device (`torch.export`, non-strict, training IR) at two
batch sizes. Aligning the two graphs gives every size and every integer argument as an
affine function of the microbatch size, without symbolic shapes and their guards; an
alignment that fails names the op and the user's line. The merged list of ops is then cut
into a preamble and a chain of blocks (`planner.blocks`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import linecache
import logging
import operator
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from planner.batch import (
    Tree,
    call_with_batch,
    flatten_batch,
    loss_of,
    unflatten_batch,
)
from planner.blocks import RawGraph, RawOp, build_graph
from planner.errors import CaptureError, ModelError
from planner.graph import Affine, ModelGraph, Op, Ref, Symbol, TensorMeta, iter_refs
from planner.model_file import ModelSource, load_model_file

__all__ = [
    "ModelSource",
    "batch_from_spec",
    "capture_module",
    "capture_source",
    "input_spec",
    "load_model_file",
]

# Two sizes above one: a size of one would be specialised (broadcast, squeeze) by PyTorch.
BATCH_SIZES = (2, 3)

# Values of small constants made inside forward are kept in the graph; larger ones are
# almost always weights that were not registered.
MAX_CONSTANT_NUMEL = 4096

_DROPPED = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}


def capture_source(source: ModelSource) -> ModelGraph:
    """Capture the model of a model file.

    Raises CaptureError naming the user's line, or ModelError when model() or batch()
    themselves fail or do not fit together.
    """
    try:
        with torch.device("meta"):
            module = source.build()
    except Exception as meta_error:
        try:  # some constructors compute with values; build for real, then drop the values
            module = source.build()
        except Exception as error:
            where = _user_line(error)
            raise ModelError(
                f"{source.path.name}: model() failed{where}: {_first_line(error)}"
            ) from meta_error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"{source.path.name}: model() returned {type(module).__name__}; return an nn.Module"
        )
    batches = []
    for size in BATCH_SIZES:
        try:
            batches.append(source.batch(size))
        except Exception as error:
            where = _user_line(error)
            raise ModelError(
                f"{source.path.name}: batch({size}) failed{where}: {_first_line(error)}"
            ) from error
    return capture_module(module, *batches, loss=source.loss, name=source.name)


def capture_module(
    module: torch.nn.Module,
    batch2: Any,
    batch3: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    name: str = "model",
) -> ModelGraph:
    """Capture a module on example batches of two and of three samples.

    The module may hold real or meta tensors; it is not changed, and its weights are not
    copied. Raises CaptureError when it can't be captured at all, or not as a function of
    the batch size; ModelError when the batches do not fit.
    """
    meta = _meta_copy(module)
    leaves = [flatten_batch(batch) for batch in (batch2, batch3)]
    if leaves[0][1] != leaves[1][1]:
        raise ModelError(
            f"batch(2) and batch(3) of {name} differ in structure; "
            "batch(size) must return the same keys for every size"
        )
    if all(
        a.shape == b.shape
        for a, b in zip(leaves[0][0].values(), leaves[1][0].values(), strict=True)
    ):
        raise ModelError(
            f"batch(2) and batch(3) of {name} have the same shapes; "
            "batch(size) must return `size` samples, usually as the first dim of each tensor"
        )
    raws = [_export(meta, tensors, tree, loss) for tensors, tree in leaves]
    merged = _merge(*raws)
    return build_graph(merged, name=name, batch_tree=leaves[0][1])


def input_spec(graph: ModelGraph) -> tuple[tuple[str, str, tuple[int | tuple[int, int], ...]], ...]:
    """Return the batch leaves as (path, dtype, shape); an affine size is (per_sample, fixed)."""
    return tuple(
        (
            t.fqn,
            t.dtype,
            tuple((s.per_sample, s.fixed) if isinstance(s, Affine) else s for s in t.shape),
        )
        for t in (graph.tensor[name] for name in graph.batch_inputs)
    )


def batch_from_spec(spec: Any, tree: Tree, size: int) -> Any:
    """Return a meta batch of `size` samples from what a plan stores of its inputs."""
    leaves = {
        path: torch.empty(
            [s[0] * size + s[1] if isinstance(s, tuple | list) else s for s in shape],
            dtype=getattr(torch, dtype),
            device="meta",
        )
        for path, dtype, shape in spec
    }
    return unflatten_batch(tree, leaves)


# ---------------------------------------------------------------------------------------
# Export of one batch size


def _meta_copy(module: torch.nn.Module) -> torch.nn.Module:
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

    def __init__(self, user: torch.nn.Module, tree: Tree, paths: tuple[str, ...], loss: Any):
        super().__init__()
        self.user = user
        self._planner_tree, self._planner_paths, self._planner_loss = tree, paths, loss

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = dict(zip(self._planner_paths, tensors, strict=True))
        batch = unflatten_batch(self._planner_tree, leaves)
        return loss_of(call_with_batch(self.user, batch), batch, self._planner_loss)


@dataclass(frozen=True, kw_only=True)
class _Exported:
    """One export as our ops with plain integers; `lines` is the user's line of each op."""

    tensors: dict[str, TensorMeta]
    inputs: tuple[str, ...]
    ops: tuple[RawOp, ...]
    loss: str
    lines: tuple[str, ...]


def _export(
    module: torch.nn.Module, tensors: Mapping[str, Any], tree: Tree, loss: Any
) -> _Exported:
    args = tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors.values())
    wrapped = _LossModule(module, tree, tuple(tensors), loss)
    try:
        with _quiet(), _no_gc():
            program = torch.export.export(wrapped, args, strict=False)
    except ModelError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error)) from error
    return _Reader(program, module, tuple(tensors)).read()


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


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """Hold back the cyclic collector: tracing only adds objects, and scanning them costs 25%."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _explain(error: BaseException) -> str:
    """One line for an export failure: the user's line, what is wrong with it, what to do."""
    for cause in _chain(error):
        if isinstance(cause, ModelError):
            return str(cause)
    line = _user_line(error)
    text = " ".join(str(e) for e in _chain(error))
    if "data-dependent" in text or "DataDependent" in text or "item()" in text:
        advice = (
            "a Python value depends on a tensor's values, which are unknown when the model is "
            "captured; use torch.where or a mask instead of if, int(), .item() or boolean indexing"
        )
    elif "meta tensor" in text.lower() or "Meta" in type(error).__name__:
        advice = "it needs a tensor's values while the model is captured; compute with tensors"
    else:
        advice = f"torch.export says {_first_line(error)}"
    return f"the model can't be captured{line}: {advice}"


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


_TORCH_DIR = str(Path(torch.__file__).parent)
_OWN_DIR = str(Path(__file__).parent)


def _user_line(error: BaseException) -> str:
    """Return `` at file:line: `code``` of the innermost frame of user code, or nothing."""
    for cause in _chain(error):
        frames = traceback.extract_tb(cause.__traceback__)
        for frame in reversed(frames):
            if not frame.filename.startswith((_TORCH_DIR, _OWN_DIR, "<")):
                code = linecache.getline(frame.filename, frame.lineno or 0).strip()
                return f" at {frame.filename}:{frame.lineno}: `{code}`"
    return ""


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


class _Reader:
    """Turns an ExportedProgram into our ops: names kept, submodules of grad and autocast
    regions inlined, asserts and no-op aliases dropped, in-place activation ops made pure.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, module: torch.nn.Module, paths: tuple[str, ...]
    ):
        self.program, self.module, self.paths = program, module, paths
        self.tensors: dict[str, TensorMeta] = {}
        self.inputs: list[str] = []
        self.ops: list[RawOp] = []
        self.lines: list[str] = []
        self.names: set[str] = set()
        self.maker: dict[str, Op] = {}
        self.stale: set[str] = set()

    def read(self) -> _Exported:
        env = self._placeholders()
        outputs = self._run(self.program.graph_module, env)
        (loss,) = outputs
        if not isinstance(loss, Ref):
            raise CaptureError("the model's loss does not depend on any op; return a computed loss")
        return _Exported(
            tensors=self.tensors,
            inputs=tuple(self.inputs),
            ops=tuple(self.ops),
            loss=loss.name,
            lines=tuple(self.lines),
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
                self._tensor(
                    node.name,
                    node.meta["val"],
                    kind="param",
                    fqn=group[0],
                    aliases=group[1:],
                    requires_grad=group[0] not in frozen,
                )
            elif spec.kind == kinds.BUFFER:
                self._tensor(node.name, node.meta["val"], kind="buffer", fqn=fqn)
            elif spec.kind == kinds.CONSTANT_TENSOR:
                self._constant(node, spec.target, fqn)
            elif spec.kind == kinds.USER_INPUT:
                path = next(user_paths)
                self._tensor(node.name, node.meta["val"], kind="input", fqn=path)
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
            self._tensor(node.name, node.meta["val"], kind="constant", fqn=fqn)
            return
        if value.numel() > MAX_CONSTANT_NUMEL or (value.is_meta and value.numel()):
            raise CaptureError(
                f"forward makes a constant tensor of shape {tuple(value.shape)} whose values can't "
                f"be kept (up to {MAX_CONSTANT_NUMEL} elements are); register it with "
                "self.register_buffer in __init__"
            )
        data = tuple(value.flatten().tolist()) if value.numel() else ()
        self._tensor(node.name, node.meta["val"], kind="constant", data=data)

    def _tensor(self, name: str, value: Any, **fields: Any) -> None:
        self.names.add(name)
        self.tensors[name] = TensorMeta(
            name=name,
            shape=tuple(int(s) for s in value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            **fields,
        )

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
        name = node.target.name()
        args = list(node.args)
        if name == "wrap_with_set_grad_enabled":
            enabled, submodule, operands = args[0], args[1], args[2:]
        elif name == "wrap_with_autocast" and not args[2]:
            enabled, submodule, operands = True, args[4], args[5:]
        else:
            raise CaptureError(
                f"the model uses {name}{_node_line(node)}, which can't be planned; "
                + (
                    "leave autocast out: precision is the plan's choice"
                    if "autocast" in name
                    else "write it with plain tensor operations"
                )
            )
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
        meta = self.tensors[ref.name]
        if not meta.requires_grad:
            return ref
        name = self._fresh(f"{ref.name}_detached")
        self.tensors[name] = TensorMeta(
            name=name, shape=meta.shape, dtype=meta.dtype, kind="activation"
        )
        self._emit(node, "aten.detach.default", name, (ref,), (), (name,))
        return Ref(name)

    def _fresh(self, name: str) -> str:
        candidates = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
        fresh = next(c for c in candidates if c not in self.names)
        self.names.add(fresh)
        return fresh

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
            parts = tuple(
                a
                for a in args[0]
                if not (
                    prod(self.tensors[a.name].shape) == 0 and len(self.tensors[a.name].shape) == 1
                )
            )
            if len(parts) == 1:
                return parts[0]
            args = (parts, *args[1:])
        if packet == "histc" and "int" in self.tensors[args[0].name].dtype:
            return self._portable_histc(node, target, args, kwargs)
        written: Ref | None = None
        if target._schema.is_mutable and packet.endswith("_"):
            target, args, written = self._functional(node, target, args)
            if target is None:  # a copy that only replaces: its source is the new value
                self._rebind(written, args[1], env, node)
                return args[1]
        values = node.meta["val"]
        many = isinstance(values, tuple | list)
        grad = self._needs_grad(packet, args, kwargs)
        outputs = []
        for index, value in enumerate(values if many else (values,)):
            name = self._fresh(f"{node.name}.{index}" if many else node.name)
            self._tensor(
                name,
                value,
                kind="activation",
                requires_grad=grad and (value.is_floating_point() or value.is_complex()),
            )
            outputs.append(name)
        self._emit(node, str(target), outputs[0], args, kwargs, tuple(outputs))
        result = tuple(Ref(o) for o in outputs) if many else Ref(outputs[0])
        if written is not None and isinstance(result, Ref):
            self._rebind(written, result, env, node)
        return result

    def _portable_histc(self, node: torch.fx.Node, target: Any, args: Any, kwargs: Any) -> Ref:
        """Count integers through float32, which is exact below 2**24 and runs on every device.

        Models choose integer histc off the CPU, and capture runs off the CPU; the plan may not.
        """
        source, counts = self.tensors[args[0].name], node.meta["val"]
        names = [self._fresh(f"{node.name}_{part}") for part in ("in", "float")]
        shapes = (source.shape, tuple(counts.shape))
        for name, shape in zip(names, shapes, strict=True):
            self.tensors[name] = TensorMeta(
                name=name, shape=shape, dtype="float32", kind="activation"
            )
        out = self._fresh(node.name)
        self._tensor(out, counts, kind="activation")
        cast, back = Symbol("dtype", "float32"), Symbol("dtype", self.tensors[out].dtype)
        to = "aten.to.dtype"
        self._emit(node, to, names[0], (args[0], cast), (), (names[0],))
        self._emit(node, str(target), names[1], (Ref(names[0]), *args[1:]), kwargs, (names[1],))
        self._emit(node, to, out, (Ref(names[1]), back), (), (out,))
        return Ref(out)

    def _functional(self, node: torch.fx.Node, target: Any, args: Any) -> tuple[Any, Any, Any]:
        """Turn an in-place op on an activation into its pure form; keep writes to buffers.

        Returns (pure target, args, tensor written). The target is None for a copy_ of an
        equal shape and dtype, whose value is simply its source.
        """
        if not isinstance(args[0], Ref) or self.tensors[args[0].name].kind == "buffer":
            return target, args, None
        written = args[0]
        if self.tensors[written.name].kind != "activation":
            raise CaptureError(
                f"the model writes in place into {written.name}{_node_line(node)}; "
                "write the out-of-place form (x = x + y)"
            )
        name = target._schema.name.split("::")[1].removesuffix("_")
        if name == "copy":
            old = self.tensors[written.name]
            new = self.tensors[args[1].name]
            if (old.shape, old.dtype) == (new.shape, new.dtype):
                return None, args, written
            return torch.ops.aten.copy.default, args, written
        packet = getattr(torch.ops.aten, name, None)
        overload = target._overloadname
        if packet is None or overload not in packet.overloads():
            raise CaptureError(
                f"the in-place op {target}{_node_line(node)} has no pure form; "
                "write the out-of-place form"
            )
        return getattr(packet, overload), args, written

    def _rebind(
        self, written: Ref, value: Ref, env: dict[torch.fx.Node, Any], node: torch.fx.Node
    ) -> None:
        """Make later uses of a tensor written in place, and of its base, see `value`."""
        while True:
            self.stale.update(self._views_of(written.name) - {value.name})
            for key, held in env.items():
                if held == written:
                    env[key] = value
            maker = self.maker.get(written.name)
            if maker is None or not _is_view(maker.target):
                return
            packet = maker.target.split(".")[1]
            if packet not in ("slice", "select"):
                raise CaptureError(
                    f"the model writes in place through {packet}{_node_line(node)}; only writes "
                    "through slices and indices can be followed; write the out-of-place form"
                )
            base = maker.args[0]
            meta = self.tensors[base.name]
            fresh = self._fresh(f"{base.name}_written")
            self.tensors[fresh] = TensorMeta(
                name=fresh,
                shape=meta.shape,
                dtype=meta.dtype,
                kind="activation",
                requires_grad=meta.requires_grad or self.tensors[value.name].requires_grad,
            )
            scatter = f"aten.{packet}_scatter.default"
            self._emit(node, scatter, fresh, (base, value, *maker.args[1:]), (), (fresh,))
            written, value = base, Ref(fresh)

    def _views_of(self, name: str) -> set[str]:
        """Names of the views taken so far of a tensor, views of views included."""
        found = {name}
        for raw in self.ops:
            if _is_view(raw.op.target) and found.intersection(raw.op.inputs):
                found.update(raw.op.outputs)
        return found - {name}

    def _needs_grad(self, packet: str, args: Any, kwargs: Any) -> bool:
        if packet in ("detach", "argmax", "argmin", "zeros_like", "ones_like", "full_like"):
            return False
        refs = iter_refs((args, tuple(v for _, v in kwargs)))
        return any(self.tensors[ref.name].requires_grad for ref in refs)

    def _emit(
        self,
        node: torch.fx.Node,
        target: str,
        name: str,
        args: Any,
        kwargs: Any,
        outputs: tuple[str, ...],
    ) -> None:
        stack = [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        path = stack[-1].removeprefix("user").removeprefix(".") if stack else ""
        op = Op(
            name=name.replace(".", "_"), target=target, args=args, kwargs=kwargs, outputs=outputs
        )
        used_stale = self.stale.intersection(op.inputs)
        if used_stale:
            raise CaptureError(
                f"the model reads a view{_node_line(node)} after its tensor was written in place; "
                "take the view again after the write, or write the out-of-place form"
            )
        self.ops.append(RawOp(op=op, module=path.split("@")[0]))
        self.maker.update(dict.fromkeys(outputs, op))
        self.lines.append(_node_line(node))

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


def _is_dtype(arg: Any) -> bool:
    return isinstance(arg, Symbol) and arg.kind == "dtype"


@functools.cache
def _is_view(target: str) -> bool:
    schema = operator.attrgetter(target)(torch.ops)._schema
    return any(r.alias_info is not None for r in schema.returns)


def _node_line(node: torch.fx.Node) -> str:
    """Return `` at file:line: `code``` of the user's code that made a node, if known."""
    trace = node.meta.get("stack_trace") or ""
    lines = trace.strip().splitlines()
    for index in range(len(lines) - 1, -1, -1):
        text = lines[index].strip()
        if text.startswith('File "') and not text.startswith(
            (f'File "{_TORCH_DIR}', f'File "{_OWN_DIR}')
        ):
            file, _, rest = text.removeprefix('File "').partition('", line ')
            number = rest.split(",")[0]
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            return f" at {file}:{number}: `{code}`"
    return ""


# ---------------------------------------------------------------------------------------
# Two exports → one graph with affine sizes


def _merge(first: _Exported, second: _Exported) -> RawGraph:
    if len(first.ops) != len(second.ops):
        raise CaptureError(
            f"the model runs {len(first.ops)} ops on {BATCH_SIZES[0]} samples and "
            f"{len(second.ops)} on {BATCH_SIZES[1]}; forward must do the same for every batch size"
        )
    ops = []
    for raw, other, line in zip(first.ops, second.ops, first.lines, strict=True):
        one, two = raw.op, other.op
        if (one.target, one.outputs) != (two.target, two.outputs):
            raise CaptureError(
                f"op {one.target}{line} differs with the batch size; "
                "forward must do the same for every batch size"
            )
        merged = Op(
            name=one.name,
            target=one.target,
            args=_merge_arg(one.args, two.args, one, line),
            kwargs=_merge_arg(one.kwargs, two.kwargs, one, line),
            outputs=one.outputs,
        )
        ops.append(RawOp(op=merged, module=raw.module))
    tensors = {}
    for name, meta in first.tensors.items():
        other_meta = second.tensors[name]
        if len(meta.shape) != len(other_meta.shape) or meta.dtype != other_meta.dtype:
            raise CaptureError(f"tensor {name} differs with the batch size in rank or dtype")
        shape = tuple(_affine(a, b) for a, b in zip(meta.shape, other_meta.shape, strict=True))
        tensors[name] = TensorMeta(
            **{f: getattr(meta, f) for f in meta.__dataclass_fields__} | {"shape": shape}
        )
    return RawGraph(tensors=tensors, inputs=first.inputs, ops=tuple(ops), loss=first.loss)


def _affine(one: int, two: int) -> int | Affine:
    if one == two:
        return one
    (small, large) = BATCH_SIZES
    slope = (two - one) // (large - small)
    return Affine(slope, one - slope * small)


def _merge_arg(one: Any, two: Any, op: Op, line: str) -> Any:
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        return tuple(_merge_arg(a, b, op, line) for a, b in zip(one, two, strict=True))
    if one == two and type(one) is type(two):
        return one
    if type(one) is int and type(two) is int:
        return _affine(one, two)
    raise CaptureError(
        f"an argument of {op.target}{line} is {one} for {BATCH_SIZES[0]} samples and {two} for "
        f"{BATCH_SIZES[1]}; it must not depend on the batch size except as a size"
    )
