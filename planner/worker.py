"""One rank: ``python -m planner.worker script.py args…``, or a request of ours.

Requests are ``--verify FILE`` and ``--trials FILE``, by `planner.runtime.proofs`, and
``--check-nodes FILE``, by `planner.runtime.preflight`.

Runs the user's script as ``__main__``, as ``python script.py args…`` would, and sees to it
that a failure is told once for the whole run and that the process ends.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from planner.errors import PlannerError
from planner.plugins import load_plugins
from planner.runtime.process.environment import DEVICE, LAUNCHER, UNMODIFIED
from planner.runtime.process.failures import FAILURE_FILE, Failure, Kind, claim, end_process
from planner.runtime.process.host.cores import available_cores, own_cores, stay_on
from planner.runtime.process.host.heap import keep_freed_memory
from planner.runtime.process.host.lifetime import die_with
from planner.runtime.start.workers import runs_script


def main(args: list[str]) -> None:
    """Run what the arguments ask for and end the process."""
    die_with(int(os.environ.get(LAUNCHER, os.getppid())))
    _settle_on_cpu()
    try:
        load_plugins()
        if args[0] == "--verify":
            from planner.runtime.proofs.verify import verify_worker

            verify_worker(Path(args[1]))
        elif args[0] == "--trials":
            from planner.runtime.proofs.trials import trials_worker

            trials_worker(Path(args[1]))
        elif args[0] == "--check-nodes":
            from planner.runtime.preflight.rank import preflight_worker

            preflight_worker(Path(args[1]))
        else:
            _run_script(args[0], args[1:])
        _leave()
        end_process(0)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            _fail("script", code, error.code)
        if code == 0:  # as at the script's end: a checkpoint may be under way
            _leave()
        end_process(code)
    except KeyboardInterrupt:  # the launcher was interrupted and tells
        end_process(128 + signal.SIGINT)
    except PlannerError as error:
        _fail("user", 2, str(error))
    except BaseException as error:
        if type(error).__name__ == "ValuesError":  # (its module loads torch, as the script has)
            _fail("values", 1, f"planner: {error}")
        story = _story(error, args[0])
        if runs_script(args):
            _fail_without_memory(error)
            if _lost_a_peer(error):
                _fail_behind_a_rank_that_ended()
                _fail("peer", 1, story)
            _fail("script", 1, story)
        _fail("library", 3, story)


def _settle_on_cpu() -> None:
    """Stay on this rank's share of the cores, which all of a node's ranks inherited alike, and
    keep memory from step to step.
    """
    if os.environ.get(DEVICE) == "cpu":
        keep_freed_memory()
        cores = available_cores()
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # not every launcher tells it
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank < ranks:
            stay_on(own_cores(cores, peers=[cores] * ranks, local_rank=local_rank))


def _run_script(script: str, args: list[str]) -> None:
    if os.environ.get(UNMODIFIED):
        from planner.integrations.script.run import run_unmodified
        from planner.runtime.process.launched import launched_plan

        run_unmodified(script, args, launched_plan())
        return
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _leave() -> None:
    """What the interpreter would do at a good end, but for taking itself apart."""
    import torch.distributed as dist

    from planner.runtime.process.ended import tell_end

    tell_end()
    # Pools first, as the interpreter does: their threads wait for work until they are told to end.
    for end in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        end()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    if dist.is_initialized():
        dist.destroy_process_group()


def _story(error: BaseException, script: str) -> str:
    """The traceback from the user's script on, under the rank it happened on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    return f"planner: rank {os.environ.get('RANK', '0')} failed\n{text.rstrip()}"


def _lost_a_peer(error: BaseException) -> bool:
    """Whether a message failed, as it does when another rank is gone: gloo raises no type of its
    own, but names its source files.
    """
    import torch.distributed as dist

    chain = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(
        isinstance(each, dist.DistError)
        or (isinstance(each, RuntimeError) and "gloo/transport" in str(each))
        for each in chain
    )


def _fail_without_memory(error: BaseException) -> None:
    """End with what this rank held if that is why it fails."""
    from planner.runtime.state.out_of_memory import describe, is_out_of_memory

    if is_out_of_memory(error):
        text, peak = describe(error, int(os.environ.get("RANK", "0")))
        _fail("memory", 1, text, peak_bytes=peak)


def _fail_behind_a_rank_that_ended() -> None:
    """End with the rank that was lost because its script had ended, if that is why."""
    from planner.runtime.process.ended import who_ended

    if told := who_ended():
        _fail("user", 2, told)


def _fail(kind: Kind, code: int, text: str, *, peak_bytes: int | None = None) -> NoReturn:
    """Tell the failure if no rank has told it, and end.

    A script's own traceback is shown here, all else by the launcher, who may know better.
    """
    has_launcher = FAILURE_FILE in os.environ
    shown_here = kind == "script" or not has_launcher
    failure = Failure(
        kind=kind,
        rank=int(os.environ.get("RANK", "0")),
        code=code,
        text="" if shown_here else text,
        peak_bytes=peak_bytes,
    )
    if (claim(failure) or not has_launcher) and shown_here:
        print(text if kind != "user" else f"planner: {text}", file=sys.stderr)
    end_process(code)


if __name__ == "__main__":
    main(sys.argv[1:])
