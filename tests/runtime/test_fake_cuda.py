"""B13: The engine on a CUDA that does nothing: what no CPU run shows, without a GPU.

Tensors have shapes, dtypes and devices, and no values: an op on two devices raises, backwards run
on autograd's thread for the device, groups and streams are those of a rank on NCCL. Cases run in
a process of their own, as the fake CUDA must be there before torch (`tests.fake_cuda`).
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.cases import CASES, Case
from tests.native import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++, which builds the fake CUDA")

TIMEOUT_S = 240

UNABLE = {
    f"dp2 cp2, zero {zero}, bf16": (
        "the mask of causal attention by pieces is a tensor subclass, which can't be made of a "
        "fake tensor",
        "Creating a new Tensor subclass CausalBias",
    )
    for zero in range(4)
}
"""Cases that fake tensors can't run: why, and how the failure reads."""

LEFT_OUT = {
    "values": "each read of a device is told 1, so no branch on a value is taken",
    "files": "a save ends with copies in host memory; values come from weight files alone",
    "the messages themselves": "ranks beside this one send and take nothing",
    "lookup of exchanged rows": "how many rows go where depends on values",
    "torch's SparseAdam": "it makes a sparse tensor of values; `AdamOfRows` stands for it",
    "the module after apply, and the loss of a prepared model": "they are tensors of a subclass, "
    "which have no fake form",
    "order of streams": "all is done at once, so no race is seen",
}
"""What no case sees, and why."""


LOOK = "runtime/step/update/values.py:Look.is_wrong: Event.synchronize"
"""The only wait of a usual step: for the flag that says whether it is finite."""

_OF_HOST_OPTIMIZER = (
    "runtime/stage/host.py:_OnStream.wait: Event.synchronize",
    "runtime/state/gradients/clip.py:Clipping.clip: pageable copy from cuda",
    # FSDP2's, on autograd's thread: for the shards of each block, and to add to them on the host.
    "outside: Event.synchronize",
    "outside: pageable copy from cuda",
)
_OF_ROWS = ("runtime/state/tables.py:_gathered: pageable copy from cpu",)
_OF_ROWS_ON_HOST = (
    "runtime/stage/host.py:_OnStream.wait: Event.synchronize",
    "runtime/state/tables.py:RowTable.lookup: pageable copy from cuda",
    "runtime/state/tables.py:_all_gather: pageable copy from cpu",
    "runtime/state/tables.py:_gathered.<locals>.<genexpr>: pageable copy from cuda",
    "runtime/state/tables.py:_gathered: pageable copy from cpu",
)


def _documented(case: Case) -> set[str]:
    """Where the host may wait in a step beside `LOOK` (docs/training.md, "Waits of a step")."""
    found: set[str] = set()
    if case.plan.get("optimizer_on_host"):
        found.update(_OF_HOST_OPTIMIZER)
    if "tables_on_host" in case.plan:
        found.update(_OF_ROWS_ON_HOST)
    if "sparse" in case.model:
        found.update(_OF_ROWS)
    return found


class Child:
    """A process with a fake CUDA, made anew when it died. Mutable."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, name: str, rank: int) -> dict[str, Any]:
        """Run a case; return its answer."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fake_cuda.child"],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps([name, rank]) + "\n")
        if not select.select([answers], [], [], TIMEOUT_S)[0]:
            self.close()
            pytest.fail(f"no answer within {TIMEOUT_S} s")
        answer = answers.readline()
        if not answer:
            pytest.fail(f"the process ended with {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None


@pytest.fixture(scope="session")
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.close()


def _items() -> Iterator[Any]:
    for name, case in CASES.items():
        for rank in case.ranks:
            marks = () if rank in case.quick else (pytest.mark.slow,)
            yield pytest.param(name, rank, id=f"{name}, rank {rank}", marks=marks)


@pytest.mark.parametrize(("name", "rank"), list(_items()))
def test_a_rank_trains(child, name, rank):
    answer = child.run(name, rank)
    failed = answer["failed"]
    if name in UNABLE:
        reason, text = UNABLE[name]
        assert failed, f"runs now, though {reason}: leave it out of UNABLE"
        assert text in failed, failed
        return
    assert not failed, failed
    if CASES[name].does not in ("prepare", "trainer"):  # (of which no step is looked into)
        waits = answer["waits"]
        assert waits.pop(LOOK) == 1, waits
        assert waits.keys() <= _documented(CASES[name]), waits
