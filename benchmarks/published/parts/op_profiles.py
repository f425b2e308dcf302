"""Single ops of GPT layers on A100 and V100, against the rates that price ops inside steps.

Rows are of the SuperScaler profiles of Mist's repository (`op_profiles.csv`): forward and backward
microseconds of an op, its megabytes. Sizes follow from these. Left out: tp above 1, whose ops have
collectives in them; the second way to divide (algo 1), which differs at tp above 1 alone; and the
embedding. Backwards of products with weights were measured without the gradient of the weight (they
take as long as forwards), and are held against one product.

    products    2 m n k over the sustained rate, in whole waves of tiles      `matmul_seconds`
    passes      bytes over the sustained bandwidth, x: of one activation      `pass_seconds`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np

from benchmarks.harness import Result, benchmark
from benchmarks.published import PUBLISHED, records_of
from costmodel.execution import find_execution
from costmodel.table.kernels import DeviceRates
from costmodel.table.rows.rows import machine_of

MIB = 2**20
HALF_BYTES = 2
VOCABULARY = 51200
GPUS = {"a100": ("A100-SXM", "40"), "v100": ("V100-SXM", "32")}
"""What rows call these devices elsewhere, by the first word of a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A layer as profiled, without tp."""

    samples: int
    hidden: int
    heads: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.samples * self.length

    @property
    def stream(self) -> int:
        """Bytes of what goes from layer to layer."""
        return HALF_BYTES * self.tokens * self.hidden

    @property
    def scores(self) -> int:
        """Bytes of attention's scores."""
        return HALF_BYTES * self.samples * self.heads * self.length**2


Seconds = tuple[float, float]
"""Forward and backward."""


def _product(rates: DeviceRates, sizes: Sizes, inner: int, outer: int) -> Seconds:
    def of(m: int, n: int, k: int) -> float:
        return rates.matmul_seconds(m, n, k, dtype="bfloat16")

    return of(sizes.tokens, outer, inner), of(sizes.tokens, inner, outer)


def _of_heads(rates: DeviceRates, sizes: Sizes, *, to_scores: bool) -> Seconds:
    width, batch = sizes.hidden // sizes.heads, sizes.samples * sizes.heads
    wide = rates.matmul_seconds(sizes.length, sizes.length, width, dtype="bfloat16", batch=batch)
    narrow = rates.matmul_seconds(sizes.length, width, sizes.length, dtype="bfloat16", batch=batch)
    return (wide, 2 * narrow) if to_scores else (narrow, wide + narrow)


def _passes(rates: DeviceRates, size: int, forward: float, backward: float) -> Seconds:
    """Passes over so many times the bytes of one activation."""
    return rates.pass_seconds(forward * size), rates.pass_seconds(backward * size)


def _loss(rates: DeviceRates, sizes: Sizes) -> Seconds:
    there, back = _product(rates, sizes, sizes.hidden, VOCABULARY)
    moved = find_execution("megatron-classic").loss_pass_bytes * sizes.tokens * VOCABULARY / 2
    once = rates.pass_seconds(moved)
    return there + once, back + once


# Passes: what is read and written, and a mask of a byte an element.
OPS: Mapping[str, tuple[str, Callable[[DeviceRates, Sizes], Seconds]]] = {
    "enc-attention-qkv": (
        "product with a weight",
        lambda rates, s: _product(rates, s, s.hidden, 3 * s.hidden),
    ),
    "enc-attention-dense": (
        "product with a weight",
        lambda rates, s: _product(rates, s, s.hidden, s.hidden),
    ),
    "enc-MLP-GEMM-1": (
        "product with a weight",
        lambda rates, s: _product(rates, s, s.hidden, 4 * s.hidden),
    ),
    "enc-MLP-GEMM-2": (
        "product with a weight",
        lambda rates, s: _product(rates, s, 4 * s.hidden, s.hidden),
    ),
    "enc-attention-score": (
        "product of heads",
        lambda rates, s: _of_heads(rates, s, to_scores=True),
    ),
    "enc-attention-context": (
        "product of heads",
        lambda rates, s: _of_heads(rates, s, to_scores=False),
    ),
    "enc-1st-layernorm": ("norm", lambda rates, s: _passes(rates, s.stream, 2, 3)),
    "enc-2nd-layernorm": ("norm", lambda rates, s: _passes(rates, s.stream, 2, 3)),
    "final-layernorm": ("norm", lambda rates, s: _passes(rates, s.stream, 2, 3)),
    "enc-MLP-gelu": ("activation", lambda rates, s: _passes(rates, 4 * s.stream, 2, 3)),
    "enc-attention-softmax": ("softmax", lambda rates, s: _passes(rates, s.scores, 2, 3)),
    "enc-attention-dropout": ("dropout", lambda rates, s: _passes(rates, s.scores, 2.5, 2.5)),
    "enc-post-attention-dropout": (
        "dropout and sum",
        lambda rates, s: _passes(rates, s.stream, 3.5, 2.5),
    ),
    "enc-post-MLP-dropout": (
        "dropout and sum",
        lambda rates, s: _passes(rates, s.stream, 3.5, 2.5),
    ),
    "gpt-post-process": ("logits and loss", _loss),
}


def sizes_of(rows: Mapping[str, Mapping[str, str]], samples: int) -> Sizes:
    """Return the sizes that megabytes of a layer's ops tell."""

    def elements(op: str, column: str) -> float:
        return float(rows[op][column]) * MIB / HALF_BYTES

    hidden = round(sqrt(elements("enc-attention-qkv", "weights_mb") / 3))
    length = round(elements("enc-1st-layernorm", "input_mb") / hidden / samples)
    scores = elements("enc-attention-softmax", "activations_mb")
    heads = round(scores / samples / length**2)
    return Sizes(samples=samples, hidden=hidden, heads=heads, length=length)


def errors_of(path: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return relative errors of forwards and backwards by device and kind of op."""
    layers: dict[tuple[str, str, int], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in records_of(path):
        if (row["tp"], row["algo"]) == ("1", "0"):
            key = row["profile"], row["model"], int(row["micro_batch"])
            layers[key][row["op"]] = row
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for (profile, _, samples), rows in layers.items():
        gpu = profile.partition("-")[0]
        name, memory = GPUS[gpu]
        _, rates, _ = machine_of({"gpu": name, "gpu_mem_gb": memory})
        sizes = sizes_of(rows, samples)
        for op, (kind, seconds) in OPS.items():
            measured = [float(rows[op][column]) / 1e6 for column in ("fwd_us", "bwd_us")]
            forward, backward = seconds(rates, sizes)
            found[gpu, kind].append((forward / measured[0] - 1, backward / measured[1] - 1))
    return found


@benchmark("op_profiles", quick={})
def op_profiles(*, rows: Path = PUBLISHED / "op_profiles.csv") -> Result:
    lines = []
    for (gpu, kind), pairs in sorted(errors_of(rows).items()):
        forward, backward = 100 * np.array(pairs).T
        lines.append(
            {
                "gpu": gpu,
                "kind": kind,
                "rows": len(pairs),
                "forward_error_pct": float(np.median(np.abs(forward))),
                "forward_bias_pct": float(np.median(forward)),
                "backward_error_pct": float(np.median(np.abs(backward))),
                "backward_bias_pct": float(np.median(backward)),
            }
        )
    return Result(lines)
