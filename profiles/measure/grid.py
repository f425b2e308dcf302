"""Probes that do not come from a model: the standard grid, and every machine's basics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, product

from planner.language.graph import Ref
from planner.units import GIB, KIB, MIB
from profiles.measure.probes import CollectiveProbe, OpProbe, float8_probe, meta, plain_probe
from profiles.records import COLLECTIVE_KINDS, Group

COPY_BYTES = 32 * MIB
FIRST_SIZES = 3


def base_probes() -> tuple[OpProbe, ...]:
    """Return the probes of issue overhead, memory rate and matmul rate, always measured."""
    always = float("inf")
    scalar = meta("x", (1,))
    # In place, so that the rate is that of memory, not of getting pages from the system.
    copied = {n: meta(n, (COPY_BYTES // 4,), requires_grad=False) for n in ("x", "z")}
    a = meta("a", (512, 512))
    return (
        plain_probe(
            "aten.neg.default",
            Ref("x"),
            tensors={"x": scalar},
            output=meta("y", (1,)),
            weight=always,
        ),
        plain_probe(
            "aten.copy_.default",
            Ref("x"),
            Ref("z"),
            tensors=copied,
            output=meta("y", (COPY_BYTES // 4,), requires_grad=False),
            weight=always,
        ),
        plain_probe(
            "aten.mm.default",
            Ref("a"),
            Ref("b"),
            tensors={"a": a, "b": meta("b", (512, 512))},
            output=meta("y", (512, 512)),
            weight=always,
        ),
    )


MESSAGE_BYTES = tuple(KIB * 4**k for k in (0, 4, 7, 2, 6, 5, 1, 3, 8, 9, 10))
"""From 1 KiB to 1 GiB, in an order in which a short budget still spans the range: 1 KiB,
256 KiB and 16 MiB first, then what lies between, and the largest last because they take
longest."""


def collective_probes(
    groups: Sequence[Group], *, most_bytes: float = GIB
) -> tuple[CollectiveProbe, ...]:
    """Return every kind on every group shape, at all of `MESSAGE_BYTES` up to `most_bytes`.

    All groups have a few sizes before any has more.
    """
    return tuple(
        CollectiveProbe(kind=kind, num_bytes=num_bytes, group=group)
        for start, stop in ((0, FIRST_SIZES), (FIRST_SIZES, len(MESSAGE_BYTES)))
        for group in groups
        for num_bytes in MESSAGE_BYTES[start:stop]
        for kind in COLLECTIVE_KINDS
        if num_bytes <= most_bytes and (kind != "send_recv" or group.size == 2)
    )


# Rows are batch times sequence; widths those of small to middling layers.
_ROWS = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192, 32768)}
_WIDTHS = {"cpu": (64, 256, 1024), "cuda": (1024, 4096, 16384)}
_DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16", "float16", "float32")}
_SEQUENCES = {"cpu": (64, 256), "cuda": (1024, 4096, 16384)}
_HEADS = {"cpu": (4, 16), "cuda": (8, 64)}
_HEAD_SIZES = {"cpu": (32, 64), "cuda": (64, 128)}
_BATCHES = {"cpu": (1, 4), "cuda": (1, 4)}
_VOCABULARIES = {"cpu": (256, 8192), "cuda": (32768, 131072)}


def standard_grid(
    device: str, *, float8: bool = False, blocks: bool = False
) -> tuple[OpProbe, ...]:
    """Return matmuls tall, wide and square, attention, and memory-bound ops.

    `float8` adds matmuls of 8-bit floats, `blocks` such with a scale for 32 neighbours.

    The backward of a linear layer covers the transposed layouts of its input's and its
    weight's gradient.
    """
    probes = []
    for in_blocks in compress((False, True), (float8, blocks)):
        probes += [
            float8_probe(m, n, k, in_blocks=in_blocks)
            for m, n, k in product(_ROWS[device], _WIDTHS[device], _WIDTHS[device])
        ]
    for dtype in _DTYPES[device]:
        probes += [
            _linear(m, n, k, dtype)
            for m, n, k in product(_ROWS[device], _WIDTHS[device], _WIDTHS[device])
        ]
        probes += [
            _attention(batch, heads, sequence, size, causal, dtype)
            for batch, heads, sequence, size, causal in product(
                _BATCHES[device],
                _HEADS[device],
                _SEQUENCES[device],
                _HEAD_SIZES[device],
                (False, True),
            )
        ]
        for rows, width in product(_ROWS[device], _WIDTHS[device]):
            probes += _memory_bound(rows, width, dtype)
        for rows, vocabulary in product(_ROWS[device], _VOCABULARIES[device]):
            probes += _vocabulary(rows, vocabulary, _WIDTHS[device][1], dtype)
    # Pointwise ops see only how many elements there are, so some of these are one probe.
    return tuple({probe.key: probe for probe in probes}.values())


def _linear(m: int, n: int, k: int, dtype: str) -> OpProbe:
    tensors = {"x": meta("x", (m, k), dtype), "w": meta("w", (n, k), dtype)}
    return plain_probe(
        "aten.linear.default",
        Ref("x"),
        Ref("w"),
        tensors=tensors,
        output=meta("y", (m, n), dtype),
    )


def _attention(
    batch: int, heads: int, sequence: int, size: int, causal: bool, dtype: str
) -> OpProbe:
    shape = (batch, heads, sequence, size)
    return plain_probe(
        "aten.scaled_dot_product_attention.default",
        Ref("q"),
        Ref("k"),
        Ref("v"),
        None,
        0.0,
        causal,
        tensors={name: meta(name, shape, dtype) for name in "qkv"},
        output=meta("y", shape, dtype),
    )


def _memory_bound(rows: int, width: int, dtype: str) -> list[OpProbe]:
    x, y = meta("x", (rows, width), dtype), meta("y", (rows, width), dtype)
    gain = meta("g", (width,), dtype)
    other = meta("z", (rows, width), dtype)
    return [
        plain_probe("aten.gelu.default", Ref("x"), tensors={"x": x}, output=y),
        plain_probe("aten.silu.default", Ref("x"), tensors={"x": x}, output=y),
        plain_probe("aten.add.Tensor", Ref("x"), Ref("z"), tensors={"x": x, "z": other}, output=y),
        plain_probe("aten.mul.Tensor", Ref("x"), Ref("z"), tensors={"x": x, "z": other}, output=y),
        plain_probe("aten.softmax.int", Ref("x"), -1, tensors={"x": x}, output=y),
        plain_probe(
            "aten.layer_norm.default",
            Ref("x"),
            (width,),
            Ref("g"),
            Ref("b"),
            tensors={"x": x, "g": gain, "b": meta("b", (width,), dtype)},
            output=y,
        ),
    ]


def _vocabulary(rows: int, vocabulary: int, width: int, dtype: str) -> list[OpProbe]:
    index = meta("i", (rows,), "int64")
    table = meta("w", (vocabulary, width), dtype)
    logits = meta("x", (rows, vocabulary), dtype)
    return [
        plain_probe(
            "aten.embedding.default",
            Ref("w"),
            Ref("i"),
            tensors={"w": table, "i": index},
            output=meta("y", (rows, width), dtype),
        ),
        plain_probe(
            "aten.cross_entropy_loss.default",
            Ref("x"),
            Ref("i"),
            tensors={"x": logits, "i": index},
            output=meta("y", (), dtype),
        ),
    ]
