"""Pack all that a machine with a GPU needs for `run_all` and can't fetch itself.

    python -m benchmarks.gpu.pack --out FOLDER [--without NAME ...]

FOLDER then has `tree` (this project, without what it does not need there), `wheels` (for CPython
3.12 on Linux x86-64; of the dependencies those that training, profiling and pricing import: no
solver, no torch), `expected` (plans and predictions, made here) and `run.sh`, which installs the
wheels beside the tree and runs everything. `--without` leaves out wheels that the machine has, such
as numpy. Together they are at most 64 MiB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from benchmarks.gpu.cases import expect
from planner.units import MIB

ROOT = Path(__file__).parents[2]

MOST_BYTES = 64 * MIB

NEEDED = ("numpy", "scipy", "pydantic", "platformdirs", "rich")
"""What training, profiling and pricing import beside torch and what torch brings along."""

BESIDE = ("nvidia-ml-py", "pytest", "pytest-timeout")
"""Clocks of the GPU, and the tests that are marked gpu."""

FOLDERS = ("planner", "profiles", "costmodel", "benchmarks", "tests", "examples")
FILES = ("pyproject.toml",)

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "any")  # fmt: skip

SCRIPT = """\
#!/bin/sh
# Installs the wheels into a folder of its own and runs everything; results are in $1.
set -e
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?give the folder for results}"
out=$(cd "$1" && pwd)
shift
python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$here/site" \\
    "$here"/wheels/*.whl
cd "$here/tree"
PYTHONPATH="$here/tree:$here/site" exec python3 -m benchmarks.gpu.run_all \\
    --out "$out" --expected "$here/expected" "$@"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack; return the exit code: 1 where it is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--without", nargs="*", default=(), help="wheels that are there already")
    asked = parser.parse_args(arguments)
    out = asked.out.resolve()
    for name in ("tree", "wheels"):
        shutil.rmtree(out / name, ignore_errors=True)
    copy_tree(out / "tree")
    download(out / "wheels", without=asked.without)
    expect(out / "expected")
    script = out / "run.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    return _told(out)


def requirements(names: Sequence[str]) -> list[str]:
    """Return the project's own bounds for names, which stand in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    bounds = {_name(requirement): requirement for requirement in every}
    return [bounds[name] for name in names]


def _name(requirement: str) -> str:
    for stop in "<>=![ ;":
        requirement = requirement.split(stop)[0]
    return requirement


def copy_tree(to: Path) -> None:
    """Copy what git tracks of the folders that are needed, and say what version it is."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *FOLDERS, *FILES], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    # Checkpoints and ranks name the project's version, by what an installation leaves.
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    installed = to / f"planner-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: planner\nVersion: {version}\n"
    )


def download(to: Path, *, without: Sequence[str]) -> None:
    """Download wheels for a Linux machine with CPython 3.12, their own dependencies among them."""
    to.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*NEEDED, *BESIDE) if name not in without]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(to)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, *requirements(names)], check=True, env=environment)
    for wheel in to.glob("*.whl"):
        # A dependency of one that stays.
        if wheel.name.split("-")[0].replace("_", "-").lower() in without:
            wheel.unlink()


def _told(out: Path) -> int:
    """Print what each part takes; return 1 where it is too much."""
    sizes = {
        name: sum(file.stat().st_size for file in (out / name).rglob("*") if file.is_file())
        for name in ("tree", "wheels", "expected")
    }
    total = sum(sizes.values())
    told = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in sizes.items())
    print(f"{out}: {told}; {total / MIB:.1f} of at most {MOST_BYTES / MIB:.0f} MiB")
    print(f"there: sh {out.name}/run.sh RESULTS")
    if total <= MOST_BYTES:
        return 0
    wheels = sorted((out / "wheels").glob("*.whl"), key=lambda file: -file.stat().st_size)
    largest = ", ".join(
        f"{w.name.split('-')[0]} ({w.stat().st_size / MIB:.0f} MiB)" for w in wheels[:3]
    )
    print(f"too much; leave out what the machine has by --without: {largest}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
