"""Data-sheet figures of the machines whose profiles are shipped. Rates are dense, per device.

Figures that are not on a data sheet say where they are from, or that they are assumed.
"""

from planner.units import GB, GIB, TB, TFLOP
from profiles.records import ClusterRecord, Figure, LinkRecord

A100_SHEET = "NVIDIA A100 Tensor Core GPU data sheet (June 2021)"
H100_SHEET = "NVIDIA H100 Tensor Core GPU data sheet, SXM5 column, without sparsity"
H200_SHEET = "NVIDIA H200 Tensor Core GPU data sheet, SXM column, without sparsity"
B200_SHEET = "NVIDIA HGX B200 data sheet (figures of 8 GPUs divided by 8), without sparsity"

GBIT = GB / 8


def sheet(value: float, detail: str) -> Figure:
    return Figure(value=value, origin="data sheet", detail=detail)


def published(value: float, detail: str) -> Figure:
    return Figure(value=value, origin="published", detail=detail)


def assumed(value: float, detail: str) -> Figure:
    return Figure(value=value, origin="assumed", detail=detail)


def link(name: str, *, bytes_per_s: float, alpha_s: float, detail: str) -> LinkRecord:
    return LinkRecord(
        name=name,
        alpha_s=assumed(alpha_s, "order of magnitude of one small message of NCCL"),
        beta_s_per_byte=sheet(1 / bytes_per_s, detail),
    )


def infiniband(gbit_per_s: int, generation: str) -> LinkRecord:
    return link(
        f"InfiniBand {generation} {gbit_per_s}",
        bytes_per_s=gbit_per_s * GBIT,
        alpha_s=8e-6,
        detail=f"one {gbit_per_s} Gb/s {generation} port for each GPU",
    )


HDR, NDR, XDR = infiniband(200, "HDR"), infiniband(400, "NDR"), infiniband(800, "XDR")
EDR = infiniband(100, "EDR")


def peaks(detail: str, **tflop_per_s: float) -> dict[str, Figure]:
    return {dtype: sheet(value * TFLOP, detail) for dtype, value in tflop_per_s.items()}


HOPPER_PEAKS = {
    "bfloat16": 989.4,
    "float16": 989.4,
    "float32": 66.9,
    "float64": 66.9,
    "float8_e4m3fn": 1978.9,
    "float8_e5m2": 1978.9,
}

CLUSTERS = {
    "a100-sxm4-80gb": ClusterRecord(
        device="NVIDIA A100-SXM4-80GB",
        device_type="cuda",
        devices_per_node=8,
        memory_bytes=published(
            79.15 * GIB, "total capacity that PyTorch reports for the 80 GB A100 and H100"
        ),
        memory_bytes_per_s=sheet(2039 * GB, A100_SHEET),
        peak_flop_per_s=peaks(A100_SHEET, bfloat16=312, float16=312, float32=19.5, float64=19.5),
        intra_node=link(
            "NVLink3+NVSwitch", bytes_per_s=300 * GB, alpha_s=3e-6, detail=f"{A100_SHEET}: 600 GB/s"
        ),
        inter_node=HDR,
        other_inter_node={"ib-100": EDR, "ib-400": NDR},
    ),
    "h100-sxm5-80gb": ClusterRecord(
        device="NVIDIA H100 80GB HBM3",
        device_type="cuda",
        devices_per_node=8,
        memory_bytes=published(
            79.11 * GIB, "total capacity in github.com/vllm-project/vllm/issues/27508"
        ),
        memory_bytes_per_s=sheet(3.35 * TB, H100_SHEET),
        peak_flop_per_s=peaks(H100_SHEET, **HOPPER_PEAKS),
        intra_node=link(
            "NVLink4+NVSwitch", bytes_per_s=450 * GB, alpha_s=3e-6, detail=f"{H100_SHEET}: 900 GB/s"
        ),
        inter_node=NDR,
        other_inter_node={"ib-200": HDR, "ib-800": XDR},
    ),
    "h200-sxm-141gb": ClusterRecord(
        device="NVIDIA H200",
        device_type="cuda",
        devices_per_node=8,
        memory_bytes=assumed(
            139.8 * GIB, "141 GB of the data sheet less what the driver keeps, as on the H100"
        ),
        memory_bytes_per_s=sheet(4.8 * TB, H200_SHEET),
        peak_flop_per_s=peaks(H200_SHEET, **HOPPER_PEAKS),
        intra_node=link(
            "NVLink4+NVSwitch", bytes_per_s=450 * GB, alpha_s=3e-6, detail=f"{H200_SHEET}: 900 GB/s"
        ),
        inter_node=NDR,
        other_inter_node={"ib-200": HDR, "ib-800": XDR},
    ),
    "b200-sxm": ClusterRecord(
        device="NVIDIA B200",
        device_type="cuda",
        devices_per_node=8,
        memory_bytes=published(178.35 * GIB, "device query in github.com/pytorch/ao/pull/4002"),
        memory_bytes_per_s=published(
            7.672 * TB, "bus width and clock in github.com/pytorch/ao/pull/4002"
        ),
        peak_flop_per_s=peaks(
            B200_SHEET,
            bfloat16=2250,
            float16=2250,
            float32=75,
            float64=37,
            float8_e4m3fn=4500,
            float8_e5m2=4500,
        ),
        intra_node=link(
            "NVLink5+NVSwitch", bytes_per_s=900 * GB, alpha_s=3e-6, detail=f"{B200_SHEET}: 1.8 TB/s"
        ),
        inter_node=NDR,
        other_inter_node={"ib-200": HDR, "ib-800": XDR},
    ),
    "a100-pcie-80gb": ClusterRecord(
        device="NVIDIA A100 80GB PCIe",
        device_type="cuda",
        devices_per_node=8,
        memory_bytes=published(
            79.15 * GIB, "total capacity that PyTorch reports for the 80 GB A100 and H100"
        ),
        memory_bytes_per_s=sheet(1935 * GB, A100_SHEET),
        peak_flop_per_s=peaks(A100_SHEET, bfloat16=312, float16=312, float32=19.5, float64=19.5),
        intra_node=link(
            "PCIe 4.0 x16", bytes_per_s=32 * GB, alpha_s=1e-5, detail=f"{A100_SHEET}: 64 GB/s"
        ),
        inter_node=link(
            "InfiniBand HDR 200, shared by 8",
            bytes_per_s=200 * GBIT / 8,
            alpha_s=8e-6,
            detail="one 200 Gb/s HDR port for each node of 8 GPUs",
        ),
        other_inter_node={
            "ib-400": link(
                "InfiniBand NDR 400, shared by 8",
                bytes_per_s=400 * GBIT / 8,
                alpha_s=8e-6,
                detail="one 400 Gb/s NDR port for each node of 8 GPUs",
            )
        },
    ),
}
