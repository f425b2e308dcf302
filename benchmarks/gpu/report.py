"""One screen: what failed, what differs by more than a tenth from its prediction, where to look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.results import WHOLE, Result, read

APART = 0.10

LINES = 45
"""Of a screen, for what differs and what failed."""

WHERE = {
    "step_s": "the profile's families below; `host` for a step that waits for its host",
    "tensor_bytes": "costmodel/memory/exact against `planner estimate`'s parts",
    "peak_bytes": "context_bytes and the allocator's overhead of the profile",
    "relative_s": "profiles/data/devices: op_fits of that family",
    "context_bytes": "profiles/data/devices: context_bytes; the groups that a plan opens",
    "launch_s": "profiles/data/devices: launch_overhead_s, host_work",
    "memory_bytes_per_s": "profiles/data/devices: memory_bytes_per_s",
}
"""By what was measured."""


def write_report(out: Path, *, device: str) -> str:
    """Write report.txt and report.json to the folder of results; return the text."""
    results = read(out)
    differing = list(differences(results))
    text = "\n".join(_lines(results, differing, device))
    (out / "report.txt").write_text(text + "\n")
    whole = {
        "results": [asdict(result) for result in results],
        "differing": differing,
        "mfu": mfu(results, device),
    }
    (out / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    return text


def differences(results: list[Result]) -> Iterator[dict[str, object]]:
    """Yield what was measured more than a tenth apart from what was predicted."""
    for result in results:
        for name, said in result.predicted.items():
            found = result.measured.get(name)
            if not found or not said or abs(said / found - 1) <= APART:
                continue
            yield {
                "part": result.part,
                "check": result.check,
                "what": name,
                "measured": found,
                "predicted": said,
                "ratio": said / found,
                "where": WHERE.get(name, ""),
            }


def mfu(results: list[Result], device: str) -> dict[str, dict[str, float]]:
    """Return by case the share of the device's bfloat16 peak: the engine's and plain PyTorch's."""
    steps = {r.check: r for r in results if r.part == "steps" and "flop" in r.predicted}
    peak = _peak(results, device)
    if not peak:
        return {}
    found: dict[str, dict[str, float]] = {}
    for result in results:
        name = result.check
        whole = steps.get(name.removesuffix(" compiled")) or steps.get(name)
        if result.part in ("steps", "plain") and whole and result.measured.get("step_s"):
            flop_per_s = whole.predicted["flop"] / result.measured["step_s"]
            found.setdefault(name, {})[result.part] = flop_per_s / peak
    return found


def _peak(results: list[Result], device: str) -> float:
    from profiles.devices import profile_for_gpu

    name = next((r.about["device"] for r in results if "device" in r.about), "")
    file = profile_for_gpu(name) if device == "cuda" else None
    return file.cluster.peak_flop_per_s["bfloat16"].value if file else 0.0


def _lines(results: list[Result], differing: list[dict[str, object]], device: str) -> Iterator[str]:
    for result in results:
        if result.part == "machine" and result.check != WHOLE:
            yield result.note
    checks = [r for r in results if r.check != WHOLE]
    counts = {
        status: sum(r.status == status for r in checks)
        for status in ("pass", "fail", "slow", "not run", "cut")
    }
    seconds = sum(r.seconds for r in results if r.check == WHOLE)
    counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    yield f"{counted}; {seconds:.0f} s"
    wrong = [r for r in results if r.status in ("fail", "cut")]
    for result in wrong[: LINES // 3]:
        yield f"{result.status.upper()} {result.part}: {result.check}: {result.note[:120]}"
    if len(wrong) > LINES // 3:
        yield f"... and {len(wrong) - LINES // 3} more in report.json"
    for result in checks:
        if result.part in ("graphs", "host") and result.measured and result.status == "pass":
            yield f"{result.part}: {result.check}: {_told(result.measured)} {result.note[:90]}"
    for name, shares in mfu(results, device).items():
        told = ", ".join(f"{part} {share:.1%}" for part, share in shares.items())
        yield f"MFU {name}: {told}"
    order = sorted(differing, key=lambda d: abs(float(str(d["ratio"])) - 1), reverse=True)
    if order:
        yield f"{len(order)} predictions are more than {APART:.0%} off:"
    for each in order[: LINES // 2]:
        measured, said = (float(str(each[key])) for key in ("measured", "predicted"))
        yield (
            f"  {each['part']}: {each['check']}: {each['what']} {measured:.3g}, predicted "
            f"{said:.3g} (x {said / measured:.2f}) -> {each['where']}"
        )
    if len(order) > LINES // 2:
        yield f"  ... and {len(order) - LINES // 2} more in report.json"


def _told(measured: dict[str, float]) -> str:
    return ", ".join(
        f"{name.removesuffix('_s')} {value * 1e6:.1f} us"
        if name.endswith("_s")
        else f"{name} {value:.6g}"
        for name, value in measured.items()
    )
