"""Plans of several ranks train as one process does, in fp64; on one GPU all ranks share it.

NCCL refuses two ranks on one GPU. They talk through the `staged` backend, which the variable
PLANNER_BACKEND chooses: each message goes over the host, by NCCL's rules of order. Without it ranks
on a CPU talk through gloo, and those on a GPU are not run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Result, Setting

BACKEND = "PLANNER_BACKEND"
STAGED = "planner.runtime.process.groups.staged"

CASE_S = 60.0
"""A case that takes longer hangs: its ranks are ended, and others go on with the next."""

START_S_PER_RANK = 20.0
"""Until ranks have met and captured their first model, on a busy machine."""

SAID = "predicted "
"""Before the name of what a rank predicts."""

SLACK = 1e-9
"""A relative gap of fp64 sums in another order."""

Case = dict[str, Any]
"""A case as JSON: name, model, ranks, and what `default_plan` is called with."""


def cases(*, tiny: bool) -> list[Case]:
    """Return what is trained, by number of ranks, as ranks of a number run one after another."""
    from planner.language.schedule.registry import SCHEDULES

    def case(name: str, ranks: int, model: str = "small-gpt", **choices: Any) -> Case:
        return {"name": name, "ranks": ranks, "model": model, "choices": choices}

    def schedule(name: str, pp: int, **more: Any) -> Case:
        vpp = max(1, SCHEDULES[name].min_vpp)
        return case(
            f"{name} on {pp}{' ' + ' '.join(more) if more else ''}",
            pp * more.get("dp", 1) * more.get("tp", 1),
            "gpt" if pp * vpp <= 4 else "deep-gpt",
            pp=pp,
            vpp=vpp,
            schedule=name,
            num_microbatches=2 * pp,
            microbatch_size=2,
            **more,
        )

    zeros = [
        case(f"zero {zero}", 2, dp=2, zero_stage=zero, num_microbatches=2, microbatch_size=2)
        for zero in (1, 2, 3)
    ]
    own = case(
        "a mesh for each stage", 4, "gpt", pp=2, tp=2, by_stage={"tp": [2, 1]}, microbatch_size=4
    )
    in_bf16 = [
        case(f"bytes of zero {zero}", 2, "decoder", dp=2, zero_stage=zero, num_microbatches=2)
        for zero in (0, 1, 2, 3)
    ]
    if tiny:
        few = [schedule(name, 2) for name in ("1f1b", "zb_v")]
        return [*few, *zeros[1:], case("cp", 2, cp=2, microbatch_size=2), in_bf16[2]]
    both = [
        case(
            f"zero {zero} under pp and tp", 8, "gpt", pp=2, dp=2, tp=2, zero_stage=zero,
            num_microbatches=4, microbatch_size=2,
        )
        for zero in (0, 1, 2, 3)
    ]  # fmt: skip
    return [
        *(schedule(name, 2) for name in SCHEDULES),
        *zeros,
        case("cp", 2, cp=2, microbatch_size=2),
        case("tp", 2, tp=2, microbatch_size=2),
        case("tied", 2, "small-tied-gpt", pp=2, microbatch_size=2),
        case("messages", 2, "messages", pp=2, num_microbatches=8, microbatch_size=2),
        *in_bf16,
        own,
        case("cp and dp", 4, "gpt", cp=2, dp=2, microbatch_size=2),
        *(schedule(name, 4) for name in SCHEDULES),
        *both,
    ]


def run(setting: Setting) -> Iterator[Result]:
    """Yield a result for each case, as long as there is time."""
    backend = os.environ.get(BACKEND)
    if importlib.util.find_spec(STAGED) is not None:
        backend = backend or "staged"
    elif setting.device == "cuda":
        note = "no staged backend"
        yield Result(part="ranks", check="all", status="not run", note=note)
        return
    deadline = time.monotonic() + setting.seconds
    left = [case for case in cases(tiny=setting.tiny) if case["name"] not in setting.known]
    with tempfile.TemporaryDirectory(prefix="planner-captures-") as captures:
        for ranks in sorted({case["ranks"] for case in left}):
            mine = [case for case in left if case["ranks"] == ranks]
            while mine:
                if time.monotonic() > deadline:
                    break
                for result in _together(mine, ranks, setting, backend, captures, deadline):
                    mine = [case for case in mine if case["name"] != result.check]
                    yield result


def _together(
    mine: list[Case],
    ranks: int,
    setting: Setting,
    backend: str | None,
    captures: str,
    deadline: float,
) -> Iterator[Result]:
    """Run cases on ranks of one start, until one fails or hangs; that one's result is the last."""
    from profiles.measure.nodes.launchers import free_port

    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.jsonl"
        answers.touch()
        environment = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "PLANNER_DEVICE": setting.device,
            # All on the first GPU.
            "PLANNER_DEVICES": ",".join(["0"] * ranks),
            "PLANNER_TEST_CAPTURES": captures,
            **({BACKEND: backend} if backend else {}),
        }
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.parts.rank"]
        command += [json.dumps(mine), str(answers)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=logs[rank].open("wb"),
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            yield from _watched(mine, processes, answers, logs, deadline)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
            for process in processes:
                process.wait()


def _watched(
    mine: list[Case],
    processes: list[subprocess.Popen[bytes]],
    answers: Path,
    logs: list[Path],
    deadline: float,
) -> Iterator[Result]:
    for index, case in enumerate(mine):
        began = time.monotonic()
        limit = min(deadline, began + CASE_S + (0 if index else START_S_PER_RANK * len(processes)))
        while True:
            found = answers.read_text().splitlines()
            if len(found) > index:
                yield _judged(case, json.loads(found[index]), time.monotonic() - began)
                break
            codes = [process.poll() for process in processes]
            if any(code not in (None, 0) for code in codes):
                time.sleep(0.5)  # the others' last lines
                failed = next(rank for rank, code in enumerate(codes) if code not in (None, 0))
                note = f"rank {failed}: {_last_line(logs[failed])}"
                yield Result(part="ranks", check=case["name"], status="fail", note=note)
                return
            if time.monotonic() > limit:
                cut = limit == deadline
                note = "the part's time was over" if cut else f"no end within {CASE_S:.0f} s"
                status = "cut" if cut else "fail"
                yield Result(part="ranks", check=case["name"], status=status, note=note)
                return
            time.sleep(0.05)


def _judged(case: Case, found: dict[str, float], seconds: float) -> Result:
    said = {name.removeprefix(SAID): v for name, v in found.items() if name.startswith(SAID)}
    found = {name: v for name, v in found.items() if not name.startswith(SAID)}
    gaps = {name: gap for name, gap in found.items() if name.endswith("_gap")}
    wrong = [f"{name} {gap:.1e}" for name, gap in gaps.items() if not gap <= SLACK]
    return Result(
        part="ranks",
        check=case["name"],
        status="fail" if wrong else "pass",
        seconds=seconds,
        measured=found,
        predicted=said,
        note=", ".join(wrong),
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "said nothing"
