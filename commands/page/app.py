"""The pages of `planner ui`, and who may read them.

Only browsers of this machine's user: the server listens on 127.0.0.1, each request must carry the
token of the printed address (403 without it), and its Host must be this machine's, so that a page
of another site that resolves its own name to 127.0.0.1 (DNS rebinding) reads nothing.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from commands.page.asked import Asked, parse_form
from commands.page.fields import CHOICES, CLUSTER, FIELDS, PRESETS, SIZES, TRAINING, Field
from commands.page.models import model_files
from commands.render.flags import with_flags
from commands.render.html.page import fill_template, text_of
from planner.errors import PlannerError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from commands.page.worker import Work, Worker

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from elsewhere; plotly sets styles of its own."""
POLICY_OF_REPORT = POLICY.replace("script-src 'self'", "script-src 'unsafe-inline'")
"""The report is one file: its scripts stand in it."""


def make_app(
    *, folder: Path, worker: Worker, token: str, port: int, start: Mapping[str, str]
) -> ASGIApp:
    """Return the pages; `start` has values of the form that differ from the usual ones."""
    machines = _machines(start)

    async def page(request: Request) -> Response:
        text = await run_in_threadpool(_form, folder, token, start)
        return Response(text, media_type="text/html")

    async def script(request: Request) -> Response:
        return _file(text_of("charts.js") + _own("form.js"), "text/javascript")

    async def style(request: Request) -> Response:
        return _file(text_of("page.css") + _own("form.css"), "text/css")

    async def plotly(request: Request) -> Response:
        from plotly.offline import get_plotlyjs

        return _file(await run_in_threadpool(get_plotlyjs), "text/javascript")

    async def answer(request: Request) -> Response:
        messages = worker.run("answer", await _asked(request))
        first = await _first(request, messages)
        if first["kind"] == "error":
            await messages.aclose()
            return PlainTextResponse(first["error"], status_code=400)

        async def lines() -> AsyncIterator[str]:
            try:
                yield json.dumps(first) + "\n"
                async for message in messages:
                    if message is not None:
                        yield json.dumps(message, allow_nan=False) + "\n"
                    elif await request.is_disconnected():
                        return  # a newer question, or nobody
            finally:
                await messages.aclose()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _asked(request: Request) -> Asked:
        form = {name: value for name, value in request.query_params.items() if name != "token"}
        return await run_in_threadpool(parse_form, form, folder, machines)

    async def _whole(request: Request, work: Work) -> str:
        messages = worker.run(work, await _asked(request))
        try:
            async for message in messages:
                if message is None and await request.is_disconnected():
                    break
                if message is not None and message["kind"] == "error":
                    raise PlannerError(message["error"])
                if message is not None and message["kind"] == "text":
                    return message["text"]
        finally:
            await messages.aclose()
        return ""

    async def report(request: Request) -> Response:
        text = await _whole(request, "report")
        headers = {"Content-Security-Policy": POLICY_OF_REPORT}
        return Response(text, media_type="text/html", headers=headers)

    async def plan(request: Request) -> Response:
        return Response(await _whole(request, "plan"), media_type="application/json")

    async def refused(request: Request, error: Exception) -> Response:
        return PlainTextResponse(" ".join(with_flags(str(error)).split()), status_code=400)

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/page.js", script),
            Route("/page.css", style),
            Route("/plotly.js", plotly),
            Route("/answer", answer),
            Route("/report", report),
            Route("/plan.json", plan),
        ],
        exception_handlers={PlannerError: refused},
    )
    return Guarded(app, token=token, port=port)


async def _first(request: Request, messages: AsyncIterator[Any]) -> dict[str, Any]:
    """Return the first message; the first answers are errors of the question itself."""
    async for message in messages:
        if message is not None:
            return message
        if await request.is_disconnected():
            break
    return {"kind": "error", "error": "nobody waits for the answer"}


class Guarded:
    """An app that answers only requests with its token and this machine's name."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":  # there are no sockets, and nothing to start
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", POLICY)
                headers.setdefault("Cache-Control", "no-store")
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        if trouble := self._trouble(scope):
            await PlainTextResponse(trouble, status_code=403)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)

    def _trouble(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts or (origin and origin.partition("://")[2] not in self._hosts):
            return "this page is for browsers of the machine that planner ui runs on"
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self._token):
            return "open the address that planner ui printed: its token is missing or wrong"
        return ""


def _file(text: str, media_type: str) -> Response:
    return Response(text, media_type=media_type)


def _own(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def _form(folder: Path, token: str, start: Mapping[str, str]) -> str:
    from costmodel.execution import execution_names
    from costmodel.table.rows.named_models import named_model
    from planner.language.schedule.registry import searched_schedules
    from planner.units import GIB
    from profiles import load_profile

    words = {"schedule": [str(name) for name in searched_schedules()],
             "execution": list(execution_names())}  # fmt: skip
    choices = [
        _with_values(field, ["", *words[field.name]]) if field.name in words else field
        for field in CHOICES
    ]
    sizes = {
        label: {field.name: getattr(named_model(name), field.name) for field in SIZES}
        for label, name in PRESETS
    }
    machines = [(name, load_profile(name)) for name in _machines(start)]
    return fill_template(
        "form.html.j2",
        "commands.page",
        token=token,
        files=model_files(folder),
        presets=sizes.items(),
        first_preset="" if start.get("model") else PRESETS[0][0],
        profiles=[
            (name, profile.cluster.device, f"{profile.memory_bytes / GIB:.2f}")
            for name, profile in machines
        ],
        sizes=SIZES,
        cluster=CLUSTER,
        training=TRAINING,
        choices=choices,
        start={
            "model": "",
            "profile": "",
            **{name: field.usual for name, field in FIELDS.items()},
            **start,
        },
    )


def _machines(start: Mapping[str, str]) -> list[str]:
    """Return the profiles to choose from: the one that the command named, and shipped ones."""
    from profiles import shipped_names

    return [*dict.fromkeys([*filter(None, [start.get("profile")]), *shipped_names()])]


def _with_values(field: Field, values: list[str]) -> Field:
    from dataclasses import replace

    return replace(field, values=tuple(values))
