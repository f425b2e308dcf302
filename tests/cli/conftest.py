"""Running the `planner` command as a person would, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a command left: exit code, output, and the lines it complained in."""

    code: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """The one line of stderr of a refused command (checked to be one, and exit code 2)."""
        lines = self.stderr.strip().splitlines()
        assert self.code == 2, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        assert len(lines) == 1, self.stderr
        return lines[0]


@pytest.fixture
def planner(tmp_path) -> Callable[..., Finished]:
    """Run `planner ARGUMENTS…` in an empty folder, with caches of its own."""

    def run(*arguments: object, timeout: float = 120, cwd: Path = tmp_path) -> Finished:
        done = subprocess.run(
            [sys.executable, "-c", "import cli; cli.main()", *map(str, arguments)],
            cwd=cwd,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Finished(code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    return run
