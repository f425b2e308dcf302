"""Starts the processes of a plan with torchelastic, in this process and without its noise.

Workers run ``python -m planner.runtime.start.worker``. The first one to fail says why, once, and
leaves its exit code in a file; torchelastic then ends the others. Interrupting this
process ends them too, and the kernel does so if it is killed outright.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from planner.errors import PlannerError

FAILURE_FILE = "PLANNER_FAILURE_FILE"
"""Names the file the first rank to fail creates: its exit code, then what the launcher tells: a
user error's message, or the traceback of a rank that runs no script of the user's."""

LAUNCHER = "PLANNER_LAUNCHER"
"""Names the process that ranks must not outlive."""

DEVICE = "PLANNER_DEVICE"
"""Names the type of device that ranks take."""

DEVICES = "PLANNER_DEVICES"
"""The numbers of this node's accelerators, one for each local rank, with commas between."""

TIMELINE_DIR = "PLANNER_TIMELINE"
"""Names the folder in which ranks record timelines; unset, they record none."""


class RankFailed(RuntimeError):
    """A rank that runs no script of the user's failed; a note holds its traceback."""


def run_workers(
    args: Sequence[str],
    *,
    num_ranks: int,
    device: str,
    num_nodes: int = 1,
    rendezvous: str = "localhost:0",
    extra: Mapping[str, str] | None = None,
) -> int:
    """Run the worker module with `args` on `num_ranks` ranks; return the exit code.

    `num_ranks` counts over all nodes; each node runs this with the same `rendezvous`
    (host:port of the first); `extra` is added to their environment. An interrupted run
    returns 128 plus the signal's number. Raises PlannerError with a rank's own message when
    that is what a rank raised, and RankFailed when one that runs no script of the user's fails.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    per_node = num_ranks // num_nodes
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        failure = Path(folder) / "failure"
        config = LaunchConfig(
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=per_node,
            run_id=uuid.uuid4().hex if num_nodes == 1 else "planner",
            rdzv_backend="c10d",
            rdzv_endpoint=rendezvous,
            max_restarts=0,
            monitor_interval=0.1,
        )
        environment = _environment(per_node, device) | {FAILURE_FILE: str(failure)}
        environment[LAUNCHER] = str(os.getpid())
        environment |= extra or {}
        # -P: a folder of the user's that is called like one of ours must not shadow it.
        command = ("-P", "-m", "planner.runtime.start.worker", *args)
        with _set_environment(environment), _quiet_elastic():
            try:
                elastic_launch(config, entrypoint=sys.executable)(*command)
            except ChildFailedError as error:
                return _exit_code(failure, error, is_script=runs_script(args))
            except SignalException as error:
                return 128 + int(error.sigval)
            except KeyboardInterrupt:
                return 130
    return 0


def runs_script(args: Sequence[str]) -> bool:
    """Whether a worker's arguments name a script of the user's, not a request of ours."""
    return not args[0].startswith("--")


def _exit_code(failure: Path, error: Exception, *, is_script: bool) -> int:
    """The code the first failing rank left; a rank that died silently is named here.

    Raises PlannerError where that is what the rank raised, RankFailed where the rank ran no
    script of the user's: the caller tells the user.
    """
    if failure.exists() and failure.read_text().strip():
        code, _, message = failure.read_text().partition("\n")
        if message and int(code) == 2:
            raise PlannerError(message)
        if message:
            failed = RankFailed(message.strip().splitlines()[-1])
            failed.add_note(message)
            raise failed
        return int(code)
    rank, first = error.get_first_failure()  # type: ignore[attr-defined]
    how = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    if not is_script:
        raise RankFailed(f"rank {rank} died with {how} and said nothing")
    print(f"planner: rank {rank} died with {how} and said nothing", file=sys.stderr)
    return 1


def _environment(ranks_here: int, device: str) -> dict[str, str]:
    environment = {DEVICE: device}
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        environment["OMP_NUM_THREADS"] = str(max(1, cores // ranks_here))
    return environment


@contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Hold back torchelastic's log lines: the failing rank has said what there is to say."""
    names = ["torch.distributed.elastic", "torch.distributed.launcher"]
    names += [n for n in logging.root.manager.loggerDict if n.startswith(tuple(names))]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
