"""GPU names as rows write them, and how devices without a profile are priced by their kin.

A device that differs from a profiled one in memory, links or clocks is priced with the rates
of that one, scaled by its own data sheet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from costmodel.table.kernels import FOUR_BITS, DeviceRates
from planner.errors import PlannerError
from planner.units import GB, TB, TFLOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU that rows may name; `kin` is the profile it is priced with.

    `pattern` is sought in the name with all but letters and digits left out. Figures are in
    the units of data sheets: dense 16-bit products, and one direction of the links. What is
    None is as in the profile. `devices_per_node` is how many devices that link joins.
    """

    pattern: str
    kin: str
    name: str
    tflop_per_s: float | None = None
    memory_tb_per_s: float | None = None
    memory_gb: float | None = None
    num_multiprocessors: int | None = None
    link_gb_per_s: float | None = None
    devices_per_node: int | None = None

    @property
    def is_kin(self) -> bool:
        """Whether the profile is of this very device."""
        return self.tflop_per_s is self.memory_tb_per_s is self.link_gb_per_s is None

    def scaled(self, rates: DeviceRates, *, kin_link_bytes_per_s: float) -> DeviceRates:
        """Return the kin's rates as they hold for this device."""
        scale, link = 1.0, 1.0
        if self.tflop_per_s is not None:
            scale = self.tflop_per_s * TFLOP / rates.peak_flop_per_s["bfloat16"]
        if self.link_gb_per_s is not None:
            link = self.link_gb_per_s * GB / kin_link_bytes_per_s
        memory = rates.memory_bytes_per_s
        if self.memory_tb_per_s is not None:
            memory = self.memory_tb_per_s * TB
        peaks = {dtype: scale * peak for dtype, peak in rates.peak_flop_per_s.items()}
        if self.kin == B200:
            peaks[FOUR_BITS] = 2 * peaks["float8_e4m3fn"]
        return replace(
            rates,
            peak_flop_per_s=peaks,
            memory_bytes_per_s=memory,
            num_multiprocessors=self.num_multiprocessors or rates.num_multiprocessors,
            link_scale=link,
        )


A100, A100_PCIE = "a100-sxm4-80gb", "a100-pcie-80gb"
H100, H200, B200 = "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm"

# fmt: off
DEVICES = tuple(
    Device(
        pattern=pattern, kin=kin, name=name, tflop_per_s=tflop, memory_tb_per_s=tb, memory_gb=gb,
        num_multiprocessors=sms, link_gb_per_s=link, devices_per_node=joined,
    )
    for pattern, kin, name, tflop, tb, gb, sms, link, joined in (
        # Sought in this order, so that the more particular names come first.
        ("GB300",           B200,      "GB300 NVL72",      2900, 8.0,   288,  None, None, 72),
        ("B300",            B200,      "B300",             2475, 8.0,   288,  None, None, None),
        ("GB200",           B200,      "GB200 NVL72",      2500, 8.0,   186,  None, None, 72),
        ("B200",            B200,      "B200",             None, None,  None, None, None, None),
        ("B100",            B200,      "B100",             1750, 8.0,   192,  None, None, None),
        ("GH200",           H100,      "GH200",            None, 4.0,   96,   None, None, None),
        ("H200",            H200,      "H200",             None, None,  None, None, None, None),
        ("H20",             H100,      "H20",              148,  4.0,   96,   78,   None, None),
        ("H800",            H100,      "H800",             None, None,  None, None, 200,  None),
        ("H100.*PCIE",      H100,      "H100 PCIe",        756,  2.0,   80,   114,  64,   None),
        ("H100.*NVL",       H100,      "H100 NVL",         835,  3.9,   94,   None, 300,  2),
        ("H100.*HBM2E",     H100,      "H100 with HBM2e",  None, 2.4,   96,   None, None, None),
        ("H100",            H100,      "H100 SXM",         None, None,  None, None, None, None),
        ("A800",            A100,      "A800 SXM",         None, None,  None, None, 200,  None),
        ("A100.*PCIE.*40G", A100_PCIE, "A100 PCIe 40GB",   None, 1.555, 40,   None, None, None),
        ("A100.*PCIE",      A100_PCIE, "A100 PCIe",        None, None,  None, None, None, None),
        ("A100.*40G",       A100,      "A100 SXM 40GB",    None, 1.555, 40,   None, None, None),
        ("A100",            A100,      "A100 SXM",         None, None,  None, None, None, None),
        ("V100.*PCIE",      A100_PCIE, "V100 PCIe",        112,  0.9,   32,   80,   16,   None),
        ("V100",            A100,      "V100 SXM",         125,  0.9,   32,   80,   150,  None),
        ("RTXPRO6000",      B200,      "RTX PRO 6000",     252,  1.79,  96,   188,  64,   None),
        ("6000ADA",         H100,      "RTX 6000 Ada",     182,  0.96,  48,   142,  32,   None),
        ("5090",            B200,      "RTX 5090",         210,  1.79,  32,   170,  64,   None),
        ("L40S",            H100,      "L40S",             362,  0.864, 48,   142,  32,   None),
        ("L40",             H100,      "L40",              181,  0.864, 48,   142,  32,   None),
        ("L4",              H100,      "L4",               121,  0.3,   24,   58,   32,   None),
        ("4090",            H100,      "RTX 4090",         165,  1.008, 24,   128,  32,   None),
        ("3090",            A100_PCIE, "RTX 3090",         71,   0.936, 24,   82,   None, None),
        ("A6000",           A100_PCIE, "RTX A6000",        155,  0.768, 48,   84,   None, None),
        ("A40",             A100_PCIE, "A40",              150,  0.696, 48,   84,   None, None),
        ("A30",             A100_PCIE, "A30",              165,  0.933, 24,   56,   None, None),
        ("A10",             A100_PCIE, "A10",              125,  0.6,   24,   72,   None, None),
        ("T4",              A100_PCIE, "T4",               65,   0.32,  16,   40,   16,   None),
        ("P100",            A100_PCIE, "P100",             21,   0.73,  16,   56,   16,   None),
        ("MI355",           B200,      "MI355X",           2500, 8.0,   288,  256,  538,  None),
        ("MI350",           B200,      "MI350X",           2300, 8.0,   288,  256,  538,  None),
        ("MI325",           H100,      "MI325X",           854,  6.0,   256,  304,  448,  None),
        ("MI300",           H100,      "MI300X",           854,  5.3,   192,  304,  448,  None),
        ("MI2[15]0",        A100,      "MI250X, one die",  191,  1.6,   64,   110,  200,  None),
        ("GAUDI3",          H100,      "Gaudi 3",          1835, 3.7,   128,  64,   600,  None),
        ("GAUDI",           H100,      "Gaudi 2",          432,  2.45,  96,   24,   262,  None),
        ("TPUV?6E|TRILLIUM", H100,     "TPU v6e",          918,  1.64,  32,   None, 224,  None),
        ("TPUV?5P",         H100,      "TPU v5p",          459,  2.765, 95,   None, 300,  None),
        ("TPUV?5E",         H100,      "TPU v5e",          197,  0.819, 16,   None, 100,  None),
        ("TPUV?4",          A100,      "TPU v4",           275,  1.2,   32,   None, 150,  None),
    )
)
"""Data sheets of NVIDIA, AMD, Intel and Google; multiprocessors are AMD's compute units and
Intel's tensor cores; of an MI200, a rank has one of the two dies. Products of the
B200's kind are limited by power: the B300's peaks are the B200's times the ratio of their
boards' (1100 to 1000 W; GB300 to GB200: 1400 to 1200 W). So are the MI300's, to under half of its
sheet: its peak is the H100's times what large products reached on both (620 to 718 TFLOP/s;
SemiAnalysis, MI300X vs H100 vs H200 benchmark, December 2024)."""
# fmt: on


def device_of(gpu: str, memory_gb: float | None = None) -> Device:
    """Return the device a row names; `memory_gb` tells sizes of the same name apart.

    Raises PlannerError when the name holds none that we know.
    """
    if not gpu.strip():
        raise PlannerError("column gpu is blank; an estimate needs it")
    squashed = re.sub(r"[^A-Z0-9]", "", gpu.upper())
    if memory_gb is not None and f"{memory_gb:.0f}G" not in squashed:
        squashed += f"{memory_gb:.0f}GB"
    for device in DEVICES:
        if re.search(device.pattern, squashed):
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise PlannerError(f"gpu {gpu!r} is not one we have data for; known: {known}")
