"""What this machine is: printed first, and kept beside every result."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.gpu.results import Result, Setting


def run(setting: Setting) -> Iterator[Result]:
    """Yield versions, clocks and free memory."""
    began = time.monotonic()
    import torch

    measured = {"cores": float(len(os.sched_getaffinity(0)))}
    lines = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    if setting.device == "cuda":
        if not torch.cuda.is_available():
            yield Result(part="machine", check="device", status="fail", note="torch sees no GPU")
            return
        from profiles.measure.driver import clock_state, driver_version

        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        state = clock_state(str(properties.uuid))
        clocks = "clocks unknown (nvidia-ml-py is not installed)"
        if state is not None:
            measured |= {
                name: value for name, value in asdict(state).items() if name != "throttled"
            }
            held = ", ".join(state.throttled) or "nothing"
            clocks = f"SM {state.sm_mhz:.0f} of {state.most_sm_mhz:.0f} MHz, held back by {held}"
        measured |= {"free_bytes": float(free), "total_bytes": float(total)}
        lines += [
            f"{properties.name} x {torch.cuda.device_count()}",
            f"CUDA {torch.version.cuda}",
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
            f"driver {driver_version() or 'unknown'}",
            clocks,
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        ]
    yield Result(
        part="machine",
        check="device",
        status="pass",
        seconds=time.monotonic() - began,
        measured=measured,
        note="; ".join(lines),
    )


def provenance(device: str) -> dict[str, str]:
    """Return device, driver and torch of this process."""
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return {"device": "cpu", "driver": platform.release(), "torch": torch.__version__}
    from profiles.measure.driver import driver_version

    return {
        "device": torch.cuda.get_device_name(0),
        "driver": driver_version() or "unknown",
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    print(json.dumps(provenance(sys.argv[1])))
