"""Small programs whose work is counted by hand."""

from __future__ import annotations

from collections.abc import Collection

from planner.language.graph import Op, Program, Ref, TensorMeta

CHAIN = {
    "a": ("aten.gelu.default", ("x",)),
    "b": ("aten.add.Tensor", ("a", "y")),
    "p": ("aten.mm.default", ("b", "w")),
    "c": ("aten.mul.Tensor", ("p", "b")),
    "d": ("aten.neg.default", ("c",)),
}
"""Two ops, a product with a weight, two ops; b is used on both sides of the product."""


def program_of(
    ops: dict[str, tuple[str, tuple[str, ...]]],
    *,
    outputs: tuple[str, ...],
    inputs: tuple[str, ...] = ("x", "y"),
    params: tuple[str, ...] = ("w",),
    shape: tuple[int, ...] = (32, 32),
    dtype: str = "float32",
    frozen: Collection[str] = (),
) -> Program:
    """Return ops on tensors of one shape (1024 floats), named after what they make."""
    return Program(
        name="block",
        inputs=inputs,
        params=params,
        outputs=outputs,
        ops=tuple(
            Op(name=made, target=target, args=tuple(Ref(n) for n in args), outputs=(made,))
            for made, (target, args) in ops.items()
        ),
        tensors=tuple(
            TensorMeta(
                name=name,
                shape=shape,
                dtype=dtype,
                kind="param" if name in params else "activation",
                requires_grad=name not in frozen,
            )
            for name in (*inputs, *params, *ops)
        ),
    )
