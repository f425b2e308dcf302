"""All that a machine with a GPU can tell of the project, in one command.

    python -m benchmarks.gpu.run_all --out FOLDER [--budget SECONDS] [--parts NAME ...]
        [--expected FOLDER] [--device cpu]

Each part runs in a process of its own with a time limit, and appends a line to
FOLDER/results.jsonl after each check: a run that is cut keeps what it had. The same command goes
on where the last one stopped: checks that have a result are not run again. `--budget` is of all
parts (720 s; 180 s with `--device cpu`, at tiny sizes), and each has its share. `--expected` is a
folder that `benchmarks.gpu.pack` made: plans, and what was predicted of them beforehand. At the end
stands one screen of text, which is in FOLDER/report.txt too, with all numbers in
FOLDER/report.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.report import write_report
from benchmarks.gpu.results import WHOLE, Result, Setting, append, read

BUDGET_S = {"cuda": 720.0, "cpu": 180.0}
GRACE_S = 3.0
"""A part that is told its seconds ends by itself; so much later it is ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return the exit code: 1 where a check failed."""
    asked = _arguments(arguments)
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if asked.child:
        _run_part(_part(asked.child), _setting(asked, out))
        return 0
    began = time.monotonic()
    budget_s = asked.budget or BUDGET_S[asked.device]
    wanted = [part for part in PARTS if not asked.parts or part.name in asked.parts]
    for part in wanted:
        ended = {r.part for r in read(out) if r.check == WHOLE and r.status == "done"}
        if part.name in ended:
            print(f"{part.name}: has its results", flush=True)
            continue
        share = part.tiny_share if asked.device == "cpu" else part.share
        limit_s = share * budget_s / BUDGET_S[asked.device]
        left_s = began + budget_s - time.monotonic()
        if left_s < min(10.0, limit_s):
            append(out, _ended(part, "not run", 0.0, "no time was left of the budget"))
            continue
        _run_child(part, out, asked, min(limit_s, left_s))
    print(write_report(out, device=asked.device))
    return int(any(result.status == "fail" for result in read(out)))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), required=False)
    parser.add_argument("--budget", type=float, help="seconds of all parts")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--expected", type=Path, help="folder of plans and predictions")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.out is None:
        parser.error("give --out, the folder for results (or the variable OUT)")
    asked.out = Path(asked.out)
    return asked


def _part(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)


def _run_child(part: Part, out: Path, asked: argparse.Namespace, limit_s: float) -> None:
    """Run a part in a process of its own; append how it ended."""
    print(f"{part.name}: {part.says} (up to {limit_s:.0f} s)", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu.run_all", "--child", part.name]
    command += ["--out", str(out), "--device", asked.device, "--seconds", f"{limit_s:.1f}"]
    if asked.expected is not None:
        command += ["--expected", str(asked.expected.resolve())]
    began = time.monotonic()
    log = out / f"{part.name}.log"
    with log.open("ab") as file:
        # A session of its own: its ranks end with it.
        child = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            code = child.wait(timeout=limit_s + GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    seconds = time.monotonic() - began
    if code == 0:
        append(out, _ended(part, "done", seconds, ""))
    elif code is None:
        append(out, _ended(part, "cut", seconds, f"its {limit_s:.0f} s were over"))
    else:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        append(out, _ended(part, "fail", seconds, f"exit code {code}: {''.join(last)[:300]}"))


def _ended(part: Part, status: str, seconds: float, note: str) -> Result:
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    return Result(
        part=part.name,
        check=WHOLE,
        status=status,  # type: ignore[arg-type]
        seconds=seconds,
        note=note,
        about=about,
    )


def _provenance(out: Path, device: str) -> dict[str, str]:
    """Return device, driver and torch: as they were found before, else found by a process that
    ends. One that looks takes the GPU's memory for its context, which a part may measure.
    """
    for result in read(out):
        if {"device", "driver", "torch"} <= result.about.keys():
            return {name: result.about[name] for name in ("device", "driver", "torch")}
    command = [sys.executable, "-m", "benchmarks.gpu.parts.machine", device]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    about: dict[str, str] = json.loads(found.stdout.splitlines()[-1])
    return about


def _setting(asked: argparse.Namespace, out: Path) -> Setting:
    known = (r.check for r in read(out) if r.part == asked.child and r.status != "cut")
    return Setting(
        out=out,
        device=asked.device,
        seconds=asked.seconds or BUDGET_S[asked.device],
        expected=asked.expected,
        known=frozenset(known) - {WHOLE},
        about={
            **_provenance(out, asked.device),
            "command": " ".join(["python -m benchmarks.gpu.run_all", *sys.argv[1:]]),
        },
    )


def _run_part(part: Part, setting: Setting) -> None:
    """Append each result of a part; an error of its own is one too."""
    try:
        for result in part.run()(setting):
            if result.check in setting.known:
                continue
            date = datetime.now(UTC).isoformat(timespec="seconds")
            append(setting.out, replace(result, about={**setting.about, "date": date}))
            print(f"{result.part}: {result.check}: {result.status} {result.note}", flush=True)
    except Exception as error:
        traceback.print_exc()
        note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        append(setting.out, Result(part=part.name, check="its own code", status="fail", note=note))


if __name__ == "__main__":
    sys.exit(main())
