"""`planner ui`: a page in the browser that searches while sliders move."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from commands.common.inputs import parse_seconds
from commands.common.options import ProfileOption
from planner.errors import PlannerError

PORT = 8610
MODEL_S = 600.0
"""What reading a model file may take, beside the search's limit."""


def ui(
    model: Annotated[
        Path | None,
        typer.Argument(help="A model file below this folder, to begin with. Default: sizes."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Devices to begin with.")] = 64,
    profile: ProfileOption = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")
    ] = PORT,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
    time_limit: Annotated[
        str, typer.Option(help="Stop after this time, such as 30s, and say how sure.")
    ] = "60s",
) -> None:
    """Explore plans in the browser, with sliders.

    Example: planner ui --gpus 8
    """
    limit_s = parse_seconds(time_limit) or 0.0
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise PlannerError(
            "planner ui needs starlette and uvicorn, which are not installed; install them: "
            "pip install 'planner[ui]'"
        ) from None
    import profiles
    from commands.page.app import make_app
    from commands.page.models import find_model
    from commands.page.worker import Worker

    folder = Path.cwd()
    start = {"gpus": str(gpus), "global_batch": str(4 * gpus)}
    if model is not None:
        file = find_model(folder, str(model))
        start |= {"model": str(file.relative_to(folder.resolve())), "length": ""}
    if profile is not None:
        profiles.load_profile(profile)
    start["profile"] = profile or "h100-sxm5-80gb"
    with _listening(port) as listener:
        own_port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        worker = Worker(time_limit_s=limit_s, most_s=limit_s + MODEL_S)
        app = make_app(folder=folder, worker=worker, token=token, port=own_port, start=start)
        address = f"http://127.0.0.1:{own_port}/?token={token}"
        print(f"planner ui is at {address}\nCtrl-C ends it", flush=True)
        if browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        server = uvicorn.Server(
            uvicorn.Config(
                app, log_level="critical", access_log=False, lifespan="off", ws="none",
                server_header=False, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            pass  # how it is meant to end
        finally:
            worker.close()


def _listening(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        why = (error.strerror or str(error)).lower()
        raise PlannerError(
            f"--port {port} was given, but {why}; give another, or --port 0 for a free one"
        ) from None
    listener.listen()
    return listener
