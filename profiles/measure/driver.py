"""What the NVIDIA driver says of this node: its version, and how its GPUs are linked.

Asked of the driver library by nvidia-ml-py (``import pynvml``) where that is installed, else
of nvidia-smi. Without either a profile is as good; links are then known only as measured.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_PATHS = (
    (10, "one PCIe switch"),
    (20, "several PCIe switches"),
    (30, "one PCIe host bridge"),
    (40, "host bridges of one NUMA node"),
    (50, "the link between sockets"),
)
"""nvmlGpuTopologyLevel_t in words: levels grow with the path."""


def driver_version() -> str | None:
    """Return the driver's version, such as ``570.86``; None where it is not known."""
    library = _library()
    if library is not None:
        with suppress(library.NVMLError):
            library.nvmlInit()
            return _text(library.nvmlSystemGetDriverVersion())
    with suppress(subprocess.SubprocessError, OSError):
        question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return _run(question).splitlines()[0].strip()
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """How fast a GPU runs in this moment, and what holds it back."""

    sm_mhz: float
    """Clock of the multiprocessors."""
    most_sm_mhz: float
    """The most that the device can do."""
    power_w: float
    throttled: tuple[str, ...]
    """Reasons why it is slower than it could be: power, heat, hardware."""


_THROTTLES = (
    ("nvmlClocksThrottleReasonSwPowerCap", "power"),
    ("nvmlClocksThrottleReasonHwSlowdown", "hardware"),
    ("nvmlClocksThrottleReasonSwThermalSlowdown", "heat"),
    ("nvmlClocksThrottleReasonHwThermalSlowdown", "heat"),
    ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "power brake"),
)


def clock_state(uuid: str) -> ClockState | None:
    """Return the clocks of the GPU of this name (torch's ``properties.uuid``); None where
    nvidia-ml-py is not installed or the driver does not say.
    """
    library = _library()
    if library is None:
        return None
    try:
        library.nvmlInit()
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        handle = library.nvmlDeviceGetHandleByUUID(name)
        reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # a set of bits
        found = (word for flag, word in _THROTTLES if reasons & getattr(library, flag, 0))
        return ClockState(
            sm_mhz=float(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
            most_sm_mhz=float(library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM)),
            power_w=library.nvmlDeviceGetPowerUsage(handle) / 1e3,
            throttled=tuple(dict.fromkeys(found)),
        )
    except library.NVMLError:
        return None


def gpu_links() -> list[str]:
    """Return how this node's GPUs are linked (NVLink or PCIe), a line a GPU, or why unknown."""
    library = _library()
    if library is not None:
        try:
            return links_by_library(library)
        except library.NVMLError as error:
            return [f"the driver library failed ({error}): links are known only as measured"]
    try:
        return parse_topology(_run(["nvidia-smi", "topo", "-m"]))
    except FileNotFoundError:
        return [
            "neither nvidia-ml-py nor nvidia-smi is installed here: links are known only as "
            "measured"
        ]
    except (subprocess.SubprocessError, OSError) as error:
        return [f"nvidia-smi topo -m failed ({error}): links are known only as measured"]


def links_by_library(library: Any) -> list[str]:
    """Return a line a GPU from the functions of `pynvml`."""
    library.nvmlInit()
    try:
        handles = [
            library.nvmlDeviceGetHandleByIndex(index)
            for index in range(library.nvmlDeviceGetCount())
        ]
        lines = []
        for index, handle in enumerate(handles):
            paths = [
                f"{_path(library, handle, other)} to GPU{number}"
                for number, other in enumerate(handles)
                if number != index
            ]
            count = _num_nvlinks(library, handle)
            links = f"{count} NVLinks; " if count else ""
            lines.append(f"GPU{index}: {links}{', '.join(paths) or 'alone'}")
        return lines
    finally:
        library.nvmlShutdown()


def _num_nvlinks(library: Any, handle: Any) -> int:
    """Return the number of active NVLinks; a GPU refuses numbers of links it does not have."""
    count = 0
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        try:
            count += library.nvmlDeviceGetNvLinkState(handle, link) == library.NVML_FEATURE_ENABLED
        except library.NVMLError:
            break
    return count


def _path(library: Any, handle: Any, other: Any) -> str:
    """Return NVLink if two GPUs reach each other by it (switches included), else the PCIe path."""
    with suppress(library.NVMLError):
        status = library.nvmlDeviceGetP2PStatus(handle, other, library.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == library.NVML_P2P_STATUS_OK:
            return "NVLink"
    level = library.nvmlDeviceGetTopologyCommonAncestor(handle, other)
    return next((words for limit, words in _PATHS if level <= limit), f"PCIe level {level}")


def parse_topology(text: str) -> list[str]:
    """Return the GPU rows of ``nvidia-smi topo -m`` in words.

    NV18 is 18 NVLinks; PIX, PXB, PHB, NODE and SYS are PCIe paths of growing length.
    """
    rows = [line.split() for line in text.splitlines()]
    # A GPU's row crosses itself with an X; the header has none.
    rows = [row for row in rows if row and row[0].startswith("GPU") and "X" in row]
    names = [row[0] for row in rows]
    lines = []
    for row in rows:
        links = zip(row[1 : 1 + len(names)], names, strict=True)
        kinds = [f"{cell} to {name}" for cell, name in links if cell != "X"]
        lines.append(f"{row[0]}: {', '.join(kinds) or 'alone'}")
    return lines


def _library() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
