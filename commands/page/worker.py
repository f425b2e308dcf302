"""The process that reads models and searches: one question at a time, stopped when told to.

    page's process                      worker's process
      send a task            ->           work, and look whether something came meanwhile
      messages               <-           progress, answers, errors
      send None to stop      ->           leave the work at its next node
      the end                <-           ready for the next task

Whatever a model file does, it does in the worker's process. A worker that does not stop in time is
ended, and another started.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from planner.errors import PlannerError

if TYPE_CHECKING:
    from commands.page.answers import Answerer
    from commands.page.asked import Asked

Work = Literal["answer", "report", "plan"]
Message = dict[str, Any]

LISTENS_S = 0.1
"""How long the page's process waits for a message before it looks at its reader again."""
LOOKS_S = 0.01
"""Between two looks for a message."""
STOPS_S = 30.0
"""How long work that was told to stop may take to do so: a capture is not interrupted."""
TELLS_S = 0.1
"""Progress is told no more often."""


class Stopped(BaseException):
    """The question is not asked any more; no `except Exception` on the way holds it up."""


class Worker:
    """The worker's process as the page sees it. Mutable; for one event loop."""

    def __init__(self, *, time_limit_s: float, most_s: float) -> None:
        """`time_limit_s` is a search's; after `most_s` a question is given up."""
        self._time_limit_s, self._most_s = time_limit_s, most_s
        self._lock = asyncio.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None
        self._told_to_stop_s: float | None = None

    async def run(self, work: Work, asked: Asked) -> AsyncGenerator[Message | None, None]:
        """Yield what the worker says of a question, None while it says nothing.

        To stop it, close the iterator.
        """
        async with self._lock:
            pipe = await self._ready()
            pipe.send((work, asked))
            started, ended = time.monotonic(), False
            try:
                while not ended:
                    message = await self._next(pipe)
                    if message is None and time.monotonic() - started > self._most_s:
                        self._end_process()
                        message = _error(
                            f"there was no answer in {self._most_s:.0f} s, so it was given up"
                        )
                    elif message is not None and message["kind"] == "gone":
                        self._end_process()
                        message = _error(
                            "the process that reads models and searches has ended; it is started "
                            "again with the next question"
                        )
                    ended = self._pipe is None or (message or {}).get("kind") == "end"
                    if (message or {}).get("kind") != "end":
                        yield message
            finally:
                if not ended and self._pipe is not None:
                    self._pipe.send(None)
                    self._told_to_stop_s = time.monotonic()

    def close(self) -> None:
        """End the worker's process."""
        self._end_process()

    async def _ready(self) -> Connection:
        """Return the pipe to a worker that does nothing now."""
        while self._pipe is not None and self._told_to_stop_s is not None:
            message = await self._next(self._pipe)
            if message is not None and message["kind"] == "end":
                self._told_to_stop_s = None
            elif (message or {}).get("kind") == "gone" or (
                time.monotonic() - self._told_to_stop_s > STOPS_S
            ):
                self._end_process()
        if self._pipe is None:
            # Spawned: no thread or socket of the page's process goes along.
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(
                target=serve, args=(theirs, self._time_limit_s), daemon=True
            )
            self._process.start()
            theirs.close()
        return self._pipe

    async def _next(self, pipe: Connection) -> Message | None:
        """Return the next message, None if there is none yet."""
        for _ in range(round(LISTENS_S / LOOKS_S)):
            try:
                if pipe.poll():
                    return pipe.recv()
            except (EOFError, OSError):
                return {"kind": "gone"}
            await asyncio.sleep(LOOKS_S)  # not a thread: if this is cancelled, nothing is lost
        return None

    def _end_process(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._pipe = self._told_to_stop_s = None


def _error(text: str) -> Message:
    return {"kind": "error", "error": text}


def serve(pipe: Connection, time_limit_s: float) -> None:
    """Answer what comes through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the page's process
    from commands.page.answers import Answerer

    answerer = Answerer(time_limit_s=time_limit_s)
    try:
        while True:
            if (task := pipe.recv()) is None:  # it came after the end of what it was for
                continue
            work, asked = task
            with suppress(Stopped):
                serve_task(answerer, work, asked, pipe)
            pipe.send({"kind": "end"})
    except (EOFError, OSError):
        return  # the page's process has ended


def serve_task(answerer: Answerer, work: Work, asked: Asked, pipe: Connection) -> None:
    """Send what there is to say of a question; raise Stopped where something else comes."""
    last_s = 0.0

    def show(message: Message) -> None:
        if pipe.poll():
            raise Stopped
        pipe.send(message)

    def tell(fraction: float, doing: str) -> None:
        nonlocal last_s
        if pipe.poll():
            raise Stopped
        if time.monotonic() - last_s > TELLS_S:
            last_s = time.monotonic()
            pipe.send({"kind": "progress", "doing": doing})

    try:
        if work == "answer":
            answerer.answer(asked, tell, show)
        else:
            show({"kind": "text", "text": getattr(answerer, work)(asked, tell)})
    except PlannerError as error:
        from commands.render.flags import with_flags

        show(_error(" ".join(with_flags(str(error)).split())))
    except Exception as error:
        from commands.render.error_report import write_report

        where = write_report(error, ["ui", asked.command], "answering a question")
        text = f"planner ui failed: {type(error).__name__}: {error}; please report it with {where}"
        show(_error(text))
