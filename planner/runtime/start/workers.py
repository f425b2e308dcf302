"""Starts the processes of a plan with torchelastic, in this process and without its noise.

Workers run ``python -m planner.worker``. The first one to fail says why, once, and
leaves it in a file; torchelastic then ends the others (`agent`), and all start again where the run
is kept (`course`). Interrupting this
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
from signal import SIGINT
from typing import TYPE_CHECKING, NoReturn

from planner.errors import PlannerError
from planner.runtime.process.environment import DEVICE, LAUNCHER
from planner.runtime.process.failures import FAILURE_FILE, Failure

if TYPE_CHECKING:
    from planner.runtime.start.course import Keeping


_ON_GPUS = {
    # Blocks of other sizes from job to job (recomputation, short batches) else leave gaps that
    # nothing fits in, near the limit that plans are made for.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Messages of a direction go one after the other on purpose (`messages.directions`).
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    # The last operations of each communicator, for whoever looks for a hang.
    "TORCH_FR_BUFFER_SIZE": "2000",
}
"""Variables of ranks on GPUs."""


class RankFailed(RuntimeError):
    """A rank that runs no script of the user's failed; a note holds its traceback."""


def run_workers(
    args: Sequence[str],
    *,
    num_ranks: int,
    device: str,
    num_nodes: int = 1,
    ranks_here: int | None = None,
    node_rank: int | None = None,
    rendezvous: str = "localhost:0",
    extra: Mapping[str, str] | None = None,
    plan: Path | None = None,
    keeping: Keeping | None = None,
    is_host: bool | None = None,
) -> int:
    """Run the worker module with `args` on `num_ranks` ranks; return the exit code.

    `num_ranks` counts over all nodes; each node runs this with the same `rendezvous`
    (host:port of the first, which is this node if `is_host`; None: by its address). `ranks_here`
    are this node's (None: as many as each other's), and `node_rank` its number in the order of
    ranks (None on all: they are sorted by name). `extra` is added to their environment. An
    interrupted run returns 128 plus the signal's number where the ranks run a script of the user's;
    another leaves by KeyboardInterrupt or SystemExit, as this process would without ranks.

    With `keeping` it starts again after failures, from the newest checkpoint; `plan` is then the
    plan it begins with. Raises PlannerError with a rank's own message when that is what a rank
    raised, and RankFailed when one that runs no script of the user's fails.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from planner.runtime.start.agent import run_agent
    from planner.runtime.start.course import Course

    per_node = ranks_here or num_ranks // num_nodes
    fewest = num_nodes
    if keeping is not None and keeping.min_ranks is not None:
        fewest = -(-keeping.min_ranks // per_node)
    with tempfile.TemporaryDirectory(prefix="planner-") as folder:
        failure = Path(folder) / "failure"
        course = Course(plan=plan, failure=failure, ranks_here=per_node, keeping=keeping)
        environment = rank_environment(per_node, device) | {FAILURE_FILE: str(failure)}
        environment[LAUNCHER] = str(os.getpid())
        if keeping is not None:
            # Ranks would else meet in one store in all rounds, and read the addresses that those
            # of the round before have left there (torch 2.13).
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        environment |= extra or {}
        with _set_environment(environment), _quiet_elastic():
            try:
                ended = run_agent(
                    worker_command(args),
                    course=course,
                    ranks_here=per_node,
                    nodes=(fewest, num_nodes),
                    node_rank=node_rank,
                    rendezvous=rendezvous,
                    run_id=uuid.uuid4().hex if num_nodes == 1 else "planner",
                    max_restarts=0 if keeping is None else keeping.max_restarts,
                    is_host=is_host,
                )
            except (SignalException, KeyboardInterrupt) as error:
                return _interrupted(getattr(error, "sigval", SIGINT), is_script=runs_script(args))
        if not ended.is_failed():
            return 0
        return _exit_code(course.failure, is_script=runs_script(args))


def worker_command(args: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a rank."""
    # -P: a folder of the user's called like one of ours must not shadow it.
    return (sys.executable, "-P", "-m", "planner.worker", *args)


def become_rank(args: Sequence[str], *, device: str, extra: Mapping[str, str]) -> NoReturn:
    """Make this process the rank that its launcher started it as. Nothing after it is run."""
    cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    environment = {**os.environ, **rank_environment(cores, device), **extra}
    command = worker_command(args)
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def runs_script(args: Sequence[str]) -> bool:
    """Whether a worker's arguments name a script of the user's, not a request of ours."""
    return not args[0].startswith("--")


def _interrupted(number: int, *, is_script: bool) -> int:
    """Leave as a process that gets this signal does; return the exit code of a script's run."""
    code = 128 + int(number)
    if is_script:
        return code
    if number == SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(code)


def _exit_code(failure: Failure | None, *, is_script: bool) -> int:
    """Tell how a run failed, and return its exit code.

    Raises PlannerError where that is what a rank raised, RankFailed where the rank ran no
    script of the user's: the caller tells the user.
    """
    if failure is None:  # a node without ranks, when the others have ended
        return 1
    if failure.kind == "user":
        raise PlannerError(failure.text)
    if failure.kind == "killed" and not is_script:
        raise PlannerError(failure.text.removeprefix("planner: "))
    if not is_script:
        failed = RankFailed(failure.text.strip().splitlines()[-1].removeprefix("planner: "))
        failed.add_note(failure.text)
        raise failed
    if failure.text:
        print(failure.text, file=sys.stderr)
    return failure.code


def rank_environment(ranks_here: int, device: str) -> dict[str, str]:
    """Return the variables of a rank's device and threads where so many ranks share a node.

    Those that the user has set stay.
    """
    environment = {DEVICE: device}
    if device != "cpu":
        environment |= {name: v for name, v in _ON_GPUS.items() if name not in os.environ}
        # (Releases before torch 2.9 have the other name, which later ones take too.)
        if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
            environment.pop("PYTORCH_ALLOC_CONF", None)
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
