"""One rank: ``python -m planner.runtime.start.worker script.py args…``, or a request of ours.

Requests are ``--verify FILE`` and ``--trials FILE``, by `planner.runtime.check`.

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

from planner.errors import PlannerError
from planner.plugins import load_plugins
from planner.runtime.start.cores import available_cores, own_cores, stay_on
from planner.runtime.start.heap import keep_freed_memory
from planner.runtime.start.lifetime import die_with
from planner.runtime.start.workers import DEVICE, FAILURE_FILE, LAUNCHER, runs_script


def main(args: list[str]) -> None:
    """Run what the arguments ask for and end the process."""
    die_with(int(os.environ.get(LAUNCHER, os.getppid())))
    _settle_on_cpu()
    try:
        load_plugins()
        if args[0] == "--verify":
            from planner.runtime.check.verify import verify_worker

            verify_worker(Path(args[1]))
        elif args[0] == "--trials":
            from planner.runtime.check.trials import trials_worker

            trials_worker(Path(args[1]))
        else:
            _run_script(args[0], args[1:])
        _leave()
        _end(0)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            _fail(code, error.code)
        if code == 0:  # as at the script's end: a checkpoint may be under way
            _leave()
        _end(code)
    except KeyboardInterrupt:  # the launcher was interrupted and tells
        _end(128 + signal.SIGINT)
    except PlannerError as error:
        _fail(2, f"planner: {error}", str(error))
    except BaseException as error:
        story = _story(error, args[0])
        # A user's script shows its own traceback; what the library runs is told by the launcher.
        _fail(*((1, story) if runs_script(args) else (3, story, story)))


def _settle_on_cpu() -> None:
    """Stay on this rank's share of the cores, which all of a node's ranks inherited alike, and
    keep memory from step to step.
    """
    if os.environ.get(DEVICE) == "cpu":
        keep_freed_memory()
        cores = available_cores()
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        local_rank = int(os.environ["LOCAL_RANK"])
        stay_on(own_cores(cores, peers=[cores] * ranks, local_rank=local_rank))


def _run_script(script: str, args: list[str]) -> None:
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _leave() -> None:
    """What the interpreter would do at a good end, but for taking itself apart."""
    import torch.distributed as dist

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


def _fail(code: int, text: str, to_launcher: str = "") -> None:
    """Tell the failure if no rank has told one, and end.

    With a launcher, the message `to_launcher` is left to it to tell.
    """
    claim = os.environ.get(FAILURE_FILE)
    first = True
    if claim:
        try:
            with open(claim, "x") as file:
                file.write(f"{code}\n{to_launcher}" if to_launcher else str(code))
                first = not to_launcher
        except FileExistsError:
            first = False
        except FileNotFoundError:  # the launcher is gone and has cleaned up
            first = False
    if first:
        print(text, file=sys.stderr)
    _end(code)


def _end(code: int) -> None:
    # Interpreter shutdown would wait for peers in process-group destructors, and may abort
    # when it meets a thread of torch's.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
