"""Tape: writes the program of a block op by op, with the shape of every tensor.

A captured op and a written one are the same record. The writer names ops as a capture does
(``linear``, ``linear_2``), so that equal blocks have equal programs.

Beside the ops, a tape notes how each tensor lies where tp splits the block as usual (Megatron-LM,
Shoeybi et al. 2019, arXiv 1909.08053; sequences between, Korthikanti et al. 2022, arXiv
2205.05198): ``H`` stands for the layout of what goes from layer to layer, R or, with sequence
parallelism, S(1), and ``F`` for that of its rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from planner.language.graph import Affine, Arg, Op, Program, Ref, Size, Symbol, TensorMeta
from planner.language.graph.model_graph import TensorKind
from planner.language.ops.record import packet_of

STREAM = "H"
"""How tensors lie that go from layer to layer: R, or S(1) with sequence parallelism."""

ROWS = "F"
"""How these lie as rows, one a token: R, or with sequence parallelism runs of each sample's."""

ORDER = "D"
"""How the order of sorted rows lies: R, or each rank's own where it sorts rows of its own."""

COUNTS = "C"
"""How numbers of rows lie: R, or each rank's own."""


def experts_place(cut: str, whole: str) -> str:
    """Return how a tensor lies where tp cuts experts' matrices, and where each rank has whole ones
    for the rows of its own.
    """
    return f"{cut}|{whole}"


def placed(text: str, *, stream: str, rows: str, cuts_experts: bool) -> str:
    """Return a placement, or the placements of an op's tensors, with all letters filled in."""
    order = rows.replace("S", "O")
    letters = {STREAM: stream, ROWS: rows, ORDER: order, COUNTS: order.replace("(0)", "")}

    def fill(place: str) -> str:
        cut, _, whole = place.partition("|")
        chosen = cut if cuts_experts or not whole else whole
        return letters.get(chosen, chosen)

    return "->".join(",".join(map(fill, side.split(","))) for side in text.split("->"))


Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor on a tape: its record, and how it lies on tp."""

    meta: TensorMeta
    place: str = "R"

    @property
    def shape(self) -> Shape:
        """Sizes, as functions of the microbatch size."""
        return self.meta.shape

    @property
    def dtype(self) -> str:
        """Data type."""
        return self.meta.dtype


class Tape:
    """The program of one block class as far as it is written. Mutable: it grows."""

    def __init__(self, name: str, *, dtype: str, frozen: bool = False) -> None:
        self.name, self.dtype = name, dtype
        self.frozen = frozen
        """Parameters written now get no gradient."""
        self.module = ""
        """Qualified name of the module whose ops are written now."""
        self.inputs: list[Value] = []
        self.params: list[Value] = []
        self.shardings: dict[str, str] = {}
        """Of each op, the layouts of its tensors on tp as `OpSharding` prints them, with H."""
        self._ops: list[Op] = []
        self._tensors: list[TensorMeta] = []
        self._names: Counter[str] = Counter()

    def input(
        self,
        *shape: Size,
        dtype: str | None = None,
        differentiable: bool = True,
        is_of_batch: bool = False,
        place: str = "R",
    ) -> Value:
        """Return a new input of the block."""
        meta = TensorMeta(
            name=f"in{len(self.inputs)}",
            shape=shape,
            dtype=dtype or self.dtype,
            kind="input" if is_of_batch else "activation",
            requires_grad=differentiable,
        )
        self.inputs.append(self._added(meta, place))
        return self.inputs[-1]

    def param(
        self,
        name: str,
        *shape: int,
        place: str = "R",
        dtype: str | None = None,
        kind: TensorKind = "param",
    ) -> Value:
        """Return a new parameter, or buffer, of the module whose ops are written."""
        meta = TensorMeta(
            name=f"p{len(self.params)}",
            shape=shape,
            dtype=dtype or self.dtype,
            kind=kind,
            requires_grad=kind == "param" and not self.frozen,
            fqn=f"{self.module}.{name}" if self.module else name,
        )
        self.params.append(self._added(meta, place))
        return self.params[-1]

    def call(
        self,
        target: str,
        *args: Arg | Value | tuple[Arg | Value, ...],
        shapes: tuple[Shape, ...],
        dtypes: tuple[str, ...] = (),
        places: tuple[str, ...] = ("R",),
        takes: tuple[str, ...] = (),
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> tuple[Value, ...]:
        """Write an op down and return its outputs.

        `takes` says how each input lies on tp where it does not come so: terms of a sum (``P``)
        are summed into the layout H where nothing is said.
        """
        used = list(_values(args))
        base = packet_of(target)
        self._names[base] += 1
        name = base if self._names[base] == 1 else f"{base}_{self._names[base]}"
        names = [name] if len(shapes) == 1 else [f"{name}.{i}" for i in range(len(shapes))]
        dtypes = dtypes or (used[0].dtype if used else self.dtype,) * len(shapes)
        needs = any(value.meta.requires_grad for value in used)
        outputs = tuple(
            self._added(
                TensorMeta(
                    name=output,
                    shape=shape,
                    dtype=dtype,
                    kind="activation",
                    requires_grad=needs and "float" in dtype and target not in _CUT_OFF,
                ),
                place,
            )
            for output, shape, dtype, place in zip(
                names, shapes, dtypes, places * len(shapes), strict=False
            )
        )
        self._ops.append(
            Op(
                name=name,
                target=target,
                args=tuple(_plain(arg) for arg in args),
                kwargs=kwargs,
                outputs=tuple(names),
                module=self.module,
            )
        )
        arrive = [takes[i] if i < len(takes) else _summed(v.place) for i, v in enumerate(used)]
        leave = [value.place for value in outputs]
        self.shardings[name] = ",".join(arrive) + "->" + ",".join(leave)
        return outputs

    def program(self, *outputs: Value) -> Program:
        """Return what was written."""
        return Program(
            name=self.name,
            inputs=tuple(value.meta.name for value in self.inputs),
            params=tuple(value.meta.name for value in self.params),
            outputs=tuple(value.meta.name for value in outputs),
            tensors=tuple(self._tensors),
            ops=tuple(self._ops),
        )

    # ---- ops that parts of models are written with

    def pointwise(
        self,
        target: str,
        *args: Arg | Value,
        dtype: str | None = None,
        takes: tuple[str, ...] = (),
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> Value:
        """Write an op on entries; the output has the shape that its inputs broadcast to."""
        used = list(_values(args))
        widest = max(used, key=lambda value: (len(value.shape), _numel(value.shape)))
        shape = _broadcast([value.shape for value in used])
        dtypes = (dtype or _promoted(used),)
        place = _summed(widest.place)
        return self.call(
            target,
            *args,
            shapes=(shape,),
            dtypes=dtypes,
            places=(place,),
            takes=takes,
            kwargs=kwargs,
        )[0]

    def left(self, output: Value) -> str:
        """Return how an output of the block lies on tp where it leaves it."""
        return _summed(output.place)

    def cast(self, x: Value, dtype: str) -> Value:
        """Write a conversion to a dtype; it moves nothing where `x` has it."""
        return self.call(
            "aten.to.dtype",
            x,
            Symbol("dtype", dtype),
            shapes=(x.shape,),
            dtypes=(dtype,),
            places=(_summed(x.place),),
        )[0]

    def linear(
        self, x: Value, width: int, *, split: str = "", bias: bool = False, segments: int = 1
    ) -> Value:
        """Write a product with a new weight matrix.

        `split` "columns": each tp rank has a part of the output's entries; "rows": it has a part of
        the input's, and makes a term of the output; "": all ranks have the whole matrix.
        """
        inner = x.shape[-1]
        assert isinstance(inner, int)
        last = len(x.shape) - 1
        part = f"x{segments}" if segments > 1 else ""
        weight_place = {"columns": f"S(0){part}", "rows": "S(1)", "": "R"}[split]
        weight = self.param("weight", width, inner, place=weight_place)
        factors: list[Value] = [x, weight]
        if bias:
            bias_place = f"S(0){part}" if split == "columns" else "R"
            factors.append(self.param("bias", width, place=bias_place))
        out = {"columns": f"S({last}){part}", "rows": "P", "": _summed(x.place)}[split]
        takes = (
            {"columns": "R", "rows": f"S({last})", "": _summed(x.place)}[split],
            weight_place,
            *(value.place for value in factors[2:]),
        )
        return self.call(
            "aten.linear.default",
            *factors,
            shapes=((*x.shape[:-1], width),),
            places=(out,),
            takes=takes,
        )[0]

    def view(
        self,
        x: Value,
        shape: tuple[Size, ...],
        *,
        said: tuple[Arg, ...] | None = None,
        place: str | None = None,
        target: str = "aten.view.default",
    ) -> Value:
        """Write another shape of a tensor; `said` is what the code says of it, with -1 in it."""
        place = _summed(x.place) if place is None else place
        return self.call(target, x, tuple(said or shape), shapes=(shape,), places=(place,))[0]

    def transpose(self, x: Value, first: int, second: int) -> Value:
        """Write an exchange of two dims."""
        shape = list(x.shape)
        shape[first], shape[second] = shape[second], shape[first]
        swap = {f"S({first})": f"S({second})", f"S({second})": f"S({first})"}
        place = swap.get(x.place, x.place)
        return self.call(
            "aten.transpose.int", x, first, second, shapes=(tuple(shape),), places=(place,)
        )[0]

    def unsqueeze(self, x: Value, dim: int, *, place: str = "R") -> Value:
        """Write a new dim of size 1, of a tensor that every tp rank takes whole; or, behind the dim
        that it is split by, as it lies (`place`).
        """
        shape = list(x.shape)
        shape.insert(dim % (len(x.shape) + 1), 1)
        return self.call(
            "aten.unsqueeze.default",
            x,
            dim,
            shapes=(tuple(shape),),
            takes=(place,),
            places=(place,),
        )[0]

    def slice(self, x: Value, dim: int, start: int, end: int, step: int = 1) -> Value:
        """Write a range of a dim."""
        shape = list(x.shape)
        size = shape[dim]
        assert isinstance(size, int)
        shape[dim] = len(range(start, min(end, size), step))
        args: tuple[Arg, ...] = (dim, start, end) if step == 1 else (dim, start, end, step)
        return self.call("aten.slice.Tensor", x, *args, shapes=(tuple(shape),), places=(x.place,))[
            0
        ]

    def split(self, x: Value, sizes: tuple[int, ...], dim: int) -> tuple[Value, ...]:
        """Write pieces of a dim of these sizes."""
        at = dim % len(x.shape)
        shapes = tuple((*x.shape[:at], size, *x.shape[at + 1 :]) for size in sizes)
        return self.call(
            "aten.split_with_sizes.default",
            x,
            sizes,
            dim,
            shapes=shapes,
            places=(_summed(x.place),) * len(sizes),
        )

    def cat(self, parts: tuple[Value, ...], dim: int = -1) -> Value:
        """Write parts side by side, all as the first lies on tp."""
        at = dim % len(parts[0].shape)
        width = sum(_number(part.shape[at]) for part in parts)
        shape = (*parts[0].shape[:at], width, *parts[0].shape[at + 1 :])
        place = parts[0].place
        takes = (place,) * len(parts)
        return self.call(
            "aten.cat.default", parts, dim, shapes=(shape,), places=(place,), takes=takes
        )[0]

    def _added(self, meta: TensorMeta, place: str) -> Value:
        self._tensors.append(meta)
        return Value(meta, place)


_CUT_OFF = {"aten.new_empty.default", "aten.zeros_like.default", "aten.empty_like.default"}
"""Ops whose results need no gradient whatever their inputs do."""

LAST = 2**63 - 1
"""The end of a slice that goes to the end."""


def _values(args: object) -> list[Value]:
    if isinstance(args, Value):
        return [args]
    if isinstance(args, tuple | list):
        return [value for arg in args for value in _values(arg)]
    return []


def _plain(arg: object) -> Arg:
    if isinstance(arg, Value):
        return Ref(arg.meta.name)
    if isinstance(arg, tuple):
        return tuple(_plain(item) for item in arg)
    return arg  # type: ignore[return-value]


def _number(size: Size) -> int:
    assert isinstance(size, int), "only the first dim grows with the microbatch"
    return size


def _summed(place: str) -> str:
    return STREAM if place == "P" else place


def _numel(shape: Shape) -> int:
    numel = 1
    for size in shape:
        numel *= size.at(2) if isinstance(size, Affine) else size
    return numel


def _broadcast(shapes: list[Shape]) -> Shape:
    rank = max(len(shape) for shape in shapes)
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((s for s in sizes if s != 1), 1) for sizes in zip(*aligned, strict=True))


def _promoted(used: list[Value]) -> str:
    floats = [value.dtype for value in used if "float" in value.dtype]
    if not floats:
        return used[0].dtype
    return "float32" if "float32" in floats else floats[0]
