"""Fit the shipped devices and clusters of profiles/data to published measurements.

Reads ops.csv, nccl.csv and layers.csv of the folder; its SOURCES.md says where each row is from.
Prints how well the fits predict a held-out fifth, and whole layers. Only coefficients go into the
profiles, with --write.
"""

import re
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd

from benchmarks.gpu.kept import read_kept, with_measured
from benchmarks.harness import Result, benchmark
from benchmarks.published import PUBLISHED
from costmodel.table.rows.row_plan import RowPrices
from costmodel.table.rows.rows import run_of
from costmodel.time.plan_price import price_plan
from costmodel.time.stage_costs.stage_costs import cut_runs
from planner.units import MIB
from profiles import shipped_names
from profiles.devices import (
    ShippedDevice,
    cluster_file,
    device_file,
    save_cluster,
    save_device,
    shipped_profile,
)
from profiles.lookup.fit import fit_nonnegative, fit_pieces, piecewise_at
from profiles.records import CollectiveFit, OpFit, ProfileFile

SIMUMAX = "SimuMax configs/system efficiencies"
CUDNN = "NVIDIA/cudnn-frontend benchmark CSVs, PyTorch flash backend"
MAMF = "best of a search in ml-engineering compute/accelerator README"
MAMF_TFLOP_PER_S = {
    "a100-sxm4-80gb": 271.2,
    "a100-pcie-80gb": 252.9,
    "h100-sxm5-80gb": 794.5,
    "h200-sxm-141gb": 794.5,
    "b200-sxm": 1745.0,
}
"""Highest bf16 matmul rate reached in practice (the H200's compute part is the H100's)."""

MEMORY_EFFICIENCY = 0.85
"""Share of the data-sheet bandwidth that memory-bound kernels reach: assumed."""


@benchmark("fit_published", quick={})
def fit_published(
    *,
    folder: Path = PUBLISHED,
    write: Annotated[bool, "write the fits into the files of devices and clusters"] = False,
) -> Result:
    ops, nccl = (pd.read_csv(folder / f"{name}.csv") for name in ("ops", "nccl"))
    notes = []
    for name in shipped_names():
        file = fitted_profile(name, ops, nccl)
        if write:
            save_fits(name, file)
        fits = f"{len(file.op_fits)} op fits, {len(file.collective_fits)} collective fits"
        notes.append(f"{name}: {fits}")
    rows = [
        {"held out": what, "median_error_pct": 100 * np.median(errors), "predictions": len(errors)}
        for what, errors in held_out(ops, nccl).items()
    ]
    notes.append("one transformer layer, never fitted to (layers.csv):")
    for what, predicted_s, measured_s in layers(pd.read_csv(folder / "layers.csv")):
        times = f"{predicted_s * 1e3:5.1f} ms, measured {measured_s * 1e3:4.1f}"
        notes.append(f"  {what:44} {times}: {predicted_s / measured_s - 1:+.1%}")
    return Result(rows, notes)


def fitted_profile(name, ops, nccl):
    """Return a shipped profile, fitted anew, with what this repository measured itself in place."""
    file = shipped_profile(name).model_copy(
        update={
            "op_fits": (*op_fits(name, ops), *memory_fits(name)),
            "collective_fits": (*collective_fits(name, nccl), *ring_fits(name, nccl)),
        }
    )
    return with_measured(file, read_kept(name))


def save_fits(name, file):
    """Write a profile's numbers into the files of its device and cluster."""
    device = device_file(name)
    parts = ShippedDevice.model_fields.keys() & ProfileFile.model_fields.keys() - {"cluster"}
    update = {part: getattr(file, part) for part in parts}
    shipped = device.shipped.model_copy(update=update)
    save_device(name, device.model_copy(update={"shipped": shipped}))
    cluster = cluster_file(shipped.cluster)
    fits = {"collective_fits": file.collective_fits}
    save_cluster(shipped.cluster, cluster.model_copy(update=fits))


# How well the fits predict rows they have not seen.

FOLDS = 5


def held_out(ops, nccl):
    """Return relative errors by name; every row is predicted once, from the other folds."""
    errors = {}
    for device in ("A100-PCIe", "B200-SXM"):
        rows = matmul_rows(ops, device)
        for direction, layouts in (("forward", ["TN"]), ("backward", ["NN", "NT"])):
            chosen = rows[rows.layout.isin(layouts)]
            errors[f"matmul {direction}, {device}"] = op_errors(chosen)
    for name in shipped_names():
        for direction in ("forward", "backward"):
            errors[f"attention {direction}, {name}"] = op_errors(
                attention_rows(ops, name, direction)
            )
    for name, systems in SYSTEMS.items():
        for system in systems:
            for (_, gpus, kind), rows in tables_of(nccl, system):
                key = f"{kind} over {gpus} above 1 MiB, {name}"
                errors[key] = collective_errors(*sizes_and_seconds(rows))
    return errors


def folds(count):
    """Yield (training, held out) index arrays; a fifth is held out at a time, at random."""
    shuffled = np.random.default_rng(0).permutation(count)
    for fold in range(FOLDS):
        out = np.zeros(count, dtype=bool)
        out[shuffled[fold::FOLDS]] = True
        yield np.flatnonzero(~out), np.flatnonzero(out)


def op_errors(rows):
    terms = np.stack([np.ones(len(rows)), rows.flop, rows.num_bytes], axis=1)
    seconds = rows.seconds.to_numpy()
    errors = []
    for seen, unseen in folds(len(rows)):
        coefficients, _ = fit_nonnegative(terms[seen], seconds[seen])
        errors += list(np.abs(terms[unseen] @ coefficients / seconds[unseen] - 1))
    return errors


def collective_errors(sizes, seconds):
    errors = []
    for seen, unseen in folds(len(sizes)):
        pieces, _ = fit_pieces(sizes[seen], seconds[seen])
        for n, truth in zip(sizes[unseen], seconds[unseen], strict=True):
            if n > MIB:
                errors.append(abs(piecewise_at(pieces, n) / truth - 1))
    return errors


def layers(table):
    """Yield (what, predicted, measured) seconds of forward and backward of published layers.

    Each is priced as a row's layer is: with the rates fitted to whole runs and the shipped
    collectives; what is recomputed is added to the backward, as in the table.
    """
    prices = RowPrices()
    for row in table.itertuples():
        run, profile, rates = run_of(
            {
                "stack": "megatron-classic",
                "gpu": "A100-SXM4-80GB",
                "layers": 1,
                "hidden": row.hidden,
                "heads": row.heads,
                "seq_len": row.seq_len,
                "micro_batch": row.micro_batch,
                "global_batch": row.micro_batch,
                "tp": row.tp,
                "pp": 1,
                "dp": 1,
                "sp": int(row.sp),
                "dtype": "fp16",
                "recompute": row.recompute,
            }
        )
        plan, costs = prices.plan(run, profile, rates)
        chain = price_plan(plan, costs).meshes[0].runs.chain
        # Between the embedding and the head.
        layer = cut_runs(chain, (1, 2)).times
        forward_s = float(layer.whole_forward_s[0])
        again_s = layer.recompute_s(plan.stages[0].recompute)
        backward_s = float((layer.whole_backward_s + again_s)[0])
        what = f"{row.recompute} recompute{', sequence parallel' if row.sp else ''}"
        yield f"forward, {what}", forward_s, row.fwd_ms / 1e3
        yield f"backward, {what}", backward_s, row.bwd_ms / 1e3


# Operators.

MATMUL_SHAPE = re.compile(r"b=(\d+) m=(\d+) k=(\d+) n=(\d+) layout=(\w+) .*out_dtype=(\w+)")


def matmul_rows(ops, device):
    """Return batch, m, k, n, layout, flop, num_bytes and seconds of the device's matmuls."""
    rows = ops[(ops.device == device) & (ops.op == "matmul")]
    table = rows["shape"].str.extract(MATMUL_SHAPE)
    table.columns = ["batch", "m", "k", "n", "layout", "out_dtype"]
    table[["batch", "m", "k", "n"]] = table[["batch", "m", "k", "n"]].astype(float)
    b, m, k, n = (table[c] for c in ("batch", "m", "k", "n"))
    # An accumulating fp32 output is read and written.
    out_bytes = np.where(table.out_dtype == "fp32", 8.0, 2.0)
    return table.assign(
        flop=2 * b * m * n * k,
        num_bytes=b * (2 * m * k + 2 * k * n + out_bytes * m * n),
        seconds=2 * b * m * n * k / (rows.tflops * 1e12),
    )


def matmul_fit(rows, *, direction, scale, detail):
    terms = np.stack([np.ones(len(rows)), rows.flop, rows.num_bytes], axis=1)
    coefficients, residual = fit_nonnegative(terms, rows.seconds.to_numpy())
    overhead, per_flop, per_byte = coefficients / [1, scale, 1]
    return OpFit(
        family="matmul",
        dtype="bfloat16",
        direction=direction,
        overhead_s=overhead,
        s_per_flop=per_flop,
        s_per_byte=per_byte,
        relative_error=float(np.median(np.abs(residual))),
        num_samples=len(rows),
        origin="fitted",
        detail=detail,
    )


def op_fits(name, ops):
    """Matmuls from the machine's own rows, or the A100's shape scaled by the best rates."""
    own = {"b200-sxm": "B200-SXM"}.get(name, "A100-PCIe")
    reference = "b200-sxm" if own == "B200-SXM" else "a100-pcie-80gb"
    scale = MAMF_TFLOP_PER_S[name] / MAMF_TFLOP_PER_S[reference]
    detail = f"{SIMUMAX} of {own}"
    if scale != 1:
        detail += f", flop rate times {scale:.2f}: ratio of the best rates ({MAMF})"
    rows = matmul_rows(ops, own)
    fits = []
    for direction, layouts in (("forward", ["TN"]), ("backward", ["NN", "NT"])):
        chosen = rows[rows.layout.isin(layouts)]
        fits.append(matmul_fit(chosen, direction=direction, scale=scale, detail=detail))
    return (*fits, *attention_fits(name, ops))


ATTENTION_SHAPE = re.compile(
    r"B=(\d+),S(?:q=\d+,Skv)?=(\d+),Hq?=(\d+)(?:,Hkv=(\d+))?,D=(\d+),causal=(\w+)"
)
SIMUMAX_ATTENTION = re.compile(
    r"batch=(\d+) seq_len=(\d+) head_num=(\d+) kv_head_num=(\d+) qk_head_dim=(\d+) v_head_dim=(\d+)"
)


def attention_rows(ops, name, direction):
    """Return flop, num_bytes and seconds of attention; causal counts half the flop."""
    short = "fwd" if direction == "forward" else "bwd"
    device, op = {
        "b200-sxm": ("B200", f"sdpa_{short}_pyt_flash_attention"),
        "h100-sxm5-80gb": ("H200 (README", f"sdpa_{short}_pytorch"),
        "h200-sxm-141gb": ("H200 (README", f"sdpa_{short}_pytorch"),
    }.get(name, ("A100-PCIe", f"sdp_{short}"))
    rows = ops[ops.device.str.startswith(device) & (ops.op == op)]
    simumax = device == "A100-PCIe"
    table = rows["shape"].str.extract(SIMUMAX_ATTENTION if simumax else ATTENTION_SHAPE)
    batch, seq, heads = (table[i].astype(float) for i in range(3))
    kv_heads = table[3].astype(float).fillna(heads)
    head_dim = table[4].astype(float)
    # SimuMax runs causal attention and counts it in full; cudnn-frontend counts half.
    share = 0.5 if simumax else np.where(table[5] == "True", 0.5, 1.0)
    flop = 4 * batch * heads * seq**2 * head_dim * share * (1 if short == "fwd" else 2.5)
    rate = rows.tflops * 1e12 * (0.5 if simumax else 1)
    moved = 2 * batch * seq * head_dim * (2 * heads + 2 * kv_heads)
    return pd.DataFrame(
        {
            "flop": flop,
            "num_bytes": moved * (1 if short == "fwd" else 2.5),
            "seconds": flop / rate,
        }
    )


def attention_fits(name, ops):
    source = SIMUMAX + " of A100-PCIe" if name.startswith("a100") else CUDNN
    scale = MAMF_TFLOP_PER_S[name] / 252.9 if name == "a100-sxm4-80gb" else 1.0
    for direction in ("forward", "backward"):
        rows = attention_rows(ops, name, direction)
        fit = matmul_fit(rows, direction=direction, scale=scale, detail=source)
        yield fit.model_copy(update={"family": "attention"})


def memory_fits(name):
    """Memory-bound ops: bytes over bandwidth."""
    rate = device_file(name).shipped.memory_bytes_per_s.value * MEMORY_EFFICIENCY
    for dtype in ("bfloat16", "float16", "float32"):
        for direction in ("forward", "backward"):
            yield OpFit(
                family="memory",
                dtype=dtype,
                direction=direction,
                overhead_s=2e-6,
                s_per_flop=0.0,
                s_per_byte=1 / rate,
                relative_error=0.3,
                num_samples=0,
                origin="assumed",
                detail=f"{MEMORY_EFFICIENCY} of the data-sheet memory bandwidth, 2 us a kernel",
            )


# Collectives.

A100_NODE = "8x A100, NVLink3"
DGX_H100 = "DGX H100 (8x H100 80GB HBM3, NVLink4)"
P5 = "AWS p5.48xlarge (8x H100, 3200 Gbps EFA)"
P5EN = "8x H200, NVLink4 (AWS p5en)"
B200_NODE = "HGX B200 (NVLink5)"
B200_PAIR = "HGX B200 (NVLink5, 8x CX-7 NDR 400G)"
P4DE = "AWS p4de.24xlarge (8x A100 80GB, 400 Gbps EFA)"
H200_RING = "8x H200, NVLink4, Ring"

SYSTEMS = {
    "a100-sxm4-80gb": [A100_NODE],
    "h100-sxm5-80gb": [DGX_H100, P5],
    "h200-sxm-141gb": [P5EN, P5],
    "b200-sxm": [B200_NODE, B200_PAIR],
    "a100-pcie-80gb": [],
}
KINDS = {"alltoall": "all_to_all", "sendrecv": "send_recv"}


def tables_of(nccl, system):
    """Yield ((nodes, gpus, kind), rows by size) of a system's tables of at least 8 sizes."""
    keys = ["nodes", "gpus", "collective"]
    for (nodes, gpus, kind), rows in nccl[nccl.system == system].groupby(keys):
        rows = rows.dropna(subset=["bytes", "algbw_GBps"]).sort_values("bytes")
        if len(rows) >= 8:
            yield (nodes, gpus, KINDS.get(kind, kind)), rows


def sizes_and_seconds(rows):
    seconds = rows.bytes / (rows.algbw_GBps * 1e9)
    return rows.bytes.to_numpy(float), seconds.to_numpy(float)


def collective_fits(name, nccl):
    """One piecewise line per table of at least 8 sizes."""
    fits = []
    for system in SYSTEMS[name]:
        for (nodes, gpus, kind), rows in tables_of(nccl, system):
            pieces, error = fit_pieces(*sizes_and_seconds(rows))
            fits.append(
                CollectiveFit(
                    kind=kind,
                    ranks_per_node=2 if kind == "send_recv" and nodes == 1 else gpus // nodes,
                    num_nodes=nodes,
                    pieces=pieces,
                    relative_error=error,
                    num_samples=len(rows),
                    origin="fitted",
                    detail=f"{system}: {rows.source.iloc[0]}",
                )
            )
    return tuple(fits)


def ring_fits(name, nccl):
    """All-gather and reduce-scatter inside Hopper nodes, which the switches do not speed up.

    Only their rate at 16 GiB is published: the all-reduce line, with its slope set to it.
    """
    if not name.startswith("h"):
        return
    reduce = next(fit for fit in collective_fits(name, nccl) if fit.num_nodes == 1)
    last = reduce.pieces[-1].beta_s_per_byte
    for kind in ("all_gather", "reduce_scatter"):
        row = nccl[(nccl.system == H200_RING) & (nccl.collective == kind)].iloc[0]
        slower = (7 / 8) / (row.busbw_GBps * 1e9) / last
        pieces = tuple(piece.scaled(steps=0.5, share=slower) for piece in reduce.pieces)
        yield reduce.model_copy(
            update={
                "kind": kind,
                "pieces": pieces,
                "relative_error": 0.15,
                "num_samples": 1,
                "detail": f"slope: {row.source} at 16 GiB on 8 H200; form: {reduce.detail}",
            }
        )
