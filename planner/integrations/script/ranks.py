"""Rank 0 runs the script alone once its model is taken over; the others follow its commands.

Up to there every rank runs the script, so that each has model and optimizer. Then the other ranks
wait in the model's first call, and make what rank 0 tells them: a batch, an update, an evaluation.
So data are read once, logs and files are written once, and what depends on time, on random
numbers or on files is what one process does.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from planner.capture.diagnose import is_users
from planner.errors import PlannerError
from planner.files import is_local

_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                 "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
                 "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
                 "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")  # fmt: skip
"""Variables by which a script would take itself for one of several processes."""

_FIRST_TELLS_S = 10.0
"""How long a rank that fails as all others do leaves it to rank 0 to tell: it has the line."""


class Variables:
    """The launcher's variables, which the script does not see. Mutable: hidden or set."""

    def __init__(self) -> None:
        self._kept = {name: os.environ[name] for name in _OF_LAUNCHERS if name in os.environ}
        self.rank = int(os.environ.get("RANK", "0"))
        self.are_hidden = False

    def hide(self) -> None:
        """Take them out of the environment."""
        for name in self._kept:
            os.environ.pop(name, None)
        self.are_hidden = True

    def restore(self) -> None:
        """Set them again."""
        os.environ.update(self._kept)
        self.are_hidden = False

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, they are set."""
        self.restore()
        try:
            yield
        finally:
            self.hide()


class Ranks:
    """What rank 0 tells the others. A command is the name of a method of `target` with arguments.

    Mutable: `target` is set when it is made.
    """

    def __init__(self) -> None:
        """Every rank calls it at the same time."""
        # (Between two commands the script may read data, or save, for as long as it likes.)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self.target: Any = None

    def all(self, command: str, *args: Any) -> Any:
        """Run a command on all ranks; return what it returns here. Rank 0 calls it."""
        given = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), args)
        self._tell((command, given))
        return getattr(self.target, command)(*args)

    def follow(self) -> NoReturn:
        """Run commands until rank 0's script ends; then end this process. Other ranks call it."""
        from planner.runtime.process.ended import end_rank

        while True:
            command, args = self._told()
            if command == "end":
                end_rank()
            try:
                getattr(self.target, command)(*args)
            except PlannerError:
                time.sleep(_FIRST_TELLS_S)
                raise

    def end(self) -> None:
        """Let the other ranks end. Rank 0 calls it."""
        self._tell(("end", ()))

    def _tell(self, told: tuple[str, Any]) -> None:
        if dist.get_world_size() > 1:
            dist.broadcast_object_list([told], src=0, group=self._group)

    def _told(self) -> tuple[str, tuple[Any, ...]]:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=0, group=self._group)
        command, args = told[0]
        return command, args


@contextmanager
def as_follower() -> Iterator[None]:
    """Inside, the script's beginning leaves nothing behind that rank 0 leaves, too: it prints
    nothing, files that it writes go nowhere, and folders that it makes may be there.
    """
    sys.stdout.flush()
    kept, silent = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    plain_open, plain_mkdir, plain_save = builtins.open, os.mkdir, torch.save

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int) and set("wax+") & set(mode) and _is_of_script():
            file, mode = os.devnull, mode.replace("x", "w")
        return plain_open(file, mode, *args, **kwargs)

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain_mkdir(path, *args, **kwargs)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def save(*args: Any, **kwargs: Any) -> None:
        if not _is_of_script():
            plain_save(*args, **kwargs)

    builtins.open = io.open = opened
    os.mkdir, torch.save = mkdir, save
    try:
        yield
    finally:
        builtins.open = io.open = plain_open
        os.mkdir, torch.save = plain_mkdir, plain_save
        os.dup2(kept, 1)
        os.close(kept)
        os.close(silent)


_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def _is_of_script() -> bool:
    """Whether a file of the user's calls, perhaps through Python's own library (`pathlib`)."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD) and "site-packages" not in file
        if not (is_standard or file.startswith("<")):
            return is_local(file) and is_users(file)
        frame = frame.f_back  # type: ignore[assignment]
    return False
