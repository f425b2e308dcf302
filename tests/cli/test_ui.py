"""`planner ui`: the page's server in this process, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from commands.page.app import make_app
from commands.page.asked import parse_form
from commands.page.fields import CHOICES, CLUSTER, SIZES, TRAINING
from commands.page.models import find_model, model_files
from commands.page.worker import Worker
from planner.errors import PlannerError
from tests.browser import BROWSER, Browser

ROOT = Path(__file__).parents[2]
TOKEN, PORT = "not-to-be-guessed", 4711
HOST = f"127.0.0.1:{PORT}"
SMALL = {
    "layers": "4", "hidden": "512", "heads": "8", "kv_heads": "8", "ffn_hidden": "2048",
    "gated_ffn": "1", "vocab": "1024", "length": "256", "profile": "h100-sxm5-80gb", "gpus": "2",
    "global_batch": "8",
}  # fmt: skip
"""A form whose search takes a moment."""


def shown(answerer: Any, asked: Any) -> list[dict[str, Any]]:
    """What a question's reader gets, in order."""
    messages: list[dict[str, Any]] = []
    answerer.answer(asked, lambda fraction, doing: None, messages.append)
    return messages


class InProcess:
    """Answers in this process, as the worker's process does."""

    async def run(self, work: str, asked: Any) -> AsyncIterator[dict[str, Any] | None]:
        from commands.page import answers

        yield None
        answerer = answers.Answerer(time_limit_s=60)
        try:
            if work == "answer":
                for message in shown(answerer, asked):
                    yield message
            else:
                tell = getattr(answerer, work)
                yield {"kind": "text", "text": tell(asked, lambda fraction, doing: None)}
        except PlannerError as error:
            yield {"kind": "error", "error": str(error)}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def get(folder):
    """Ask the app in this process: (status, headers, text)."""
    app = make_app(folder=folder, worker=InProcess(), token=TOKEN, port=PORT, start={})

    def ask(
        path: str, form: dict[str, str] | None = None, *, token: str | None = TOKEN, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        words = {**(form or {}), **({} if token is None else {"token": token})}
        sent = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
            "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": urlencode(words).encode(), "client": ("127.0.0.1", 1), "server": None,
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }  # fmt: skip
        messages: list[dict[str, Any]] = []

        async def call() -> None:
            waits = asyncio.Event()
            began = False

            async def receive() -> dict[str, Any]:
                nonlocal began
                if not began:
                    began = True
                    return {"type": "http.request", "body": b"", "more_body": False}
                await waits.wait()
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                messages.append(message)

            await app(scope, receive, send)

        asyncio.run(call())
        text = b"".join(message.get("body", b"") for message in messages).decode()
        told = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        return messages[0]["status"], told, text

    return ask


PAGES = ("/", "/page.js", "/page.css", "/plotly.js", "/answer", "/report", "/plan.json", "/none")


@pytest.mark.parametrize("path", PAGES)
def test_without_the_token_nothing_is_answered(get, path):
    for token in (None, "", TOKEN[:-1], TOKEN + "x", "ü"):
        status, _, text = get(path, SMALL, token=token)
        assert status == 403
        assert TOKEN not in text


@pytest.mark.parametrize(
    "headers",
    [
        {"host": f"evil.example:{PORT}"}, {"host": "127.0.0.1"}, {"host": ""},
        {"host": "127.0.0.1:80"}, {"origin": "http://evil.example"}, {"origin": "null"},
    ],
)  # fmt: skip
def test_other_sites_read_nothing(get, headers):
    """A name of theirs may lead to 127.0.0.1: then the Host is their name."""
    assert get("/", **headers)[0] == 403
    assert get("/", host=f"localhost:{PORT}", origin=f"http://{HOST}")[0] == 200


def test_the_page_has_a_name_and_a_meaning_for_every_field_and_loads_nothing(get, folder):
    status, headers, text = get("/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"(?:src|href)=\"(?!#|data:|/page|/plotly)", text)
    for field in (*SIZES, *CLUSTER, *TRAINING, *CHOICES):
        assert re.search(rf'<label[^>]* for="{field.name}"|<label for="{field.name}"', text)
        assert f'id="{field.name}-means"' in text
    for slider in re.findall(r"<input type=\"range\"[^>]*>", text):
        assert "aria-label=" in slider
        assert "aria-describedby=" in slider


def test_only_models_below_the_working_folder_are_named(folder, tmp_path):
    model = "def model(): ...\ndef batch(size): ...\nraise SystemExit('was executed')\n"
    outside = tmp_path / "outside.py"
    outside.write_text(model)
    (folder / "deep").mkdir()
    (folder / "deep" / "net.py").write_text(model)
    (folder / "notes.txt").write_text(model)
    (folder / "other.py").write_text("x = 1\n")
    (folder / "link.py").symlink_to(outside)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "alias.py").symlink_to(folder / "notes.txt")
    assert model_files(folder) == ["deep/net.py"]
    assert find_model(folder, "deep/net.py") == folder / "deep" / "net.py"
    for given in (
        "../outside.py", str(outside), "link.py", "linked/outside.py", "deep/../../outside.py",
        "notes.txt", "alias.py", "deep", "none.py", "", "a\0.py", "x" * 5000 + ".py",
        str(folder / "deep" / "net.py"),
    ):  # fmt: skip
        with pytest.raises(PlannerError, match="inside the working folder"):
            find_model(folder, given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": "many"}, "--gpus many was given; it is a whole number"),
        ({"gpus": "1.5"}, "--gpus 1.5 was given; it is a whole number"),
        ({"gpus": "nan"}, "--gpus nan was given"),
        ({"gpus": "inf"}, "--gpus inf was given"),
        ({"gpus": "-2"}, "--gpus -2 was given; it is 0 or more"),
        ({"gpus": "1e9"}, "at most 131,072"),
        ({"gpus": ""}, "no number of GPUs"),
        ({"gpus": "0"}, "needs at least one device"),
        ({"memory_limit": "0"}, "--memory-limit 0 was given"),
        ({"layers": "x"}, "layers x was given; it is a whole number"),
        ({"kv_heads": "3"}, "kv_heads=3 does not divide heads=8"),
        ({"link_rate": "0"}, "0"),
        ({"model": "../secret.py"}, "inside the working folder"),
        ({"model": "/etc/passwd"}, "inside the working folder"),
        ({"profile": "h1000"}, "'h1000' was given; it is one of a100"),
        ({"profile": "/root"}, "'/root' was given; it is one of a100"),
        ({"schedule": "zigzag"}, "zigzag"),
        ({"execution": "mine"}, "mine"),
        ({"execution": "../execution/data/nanotron"}, "is unknown"),
        ({"tp": "3"}, "3"),
        ({"solver": "ilp"}, "no field of the form"),
    ],
)
def test_what_cannot_be_answered_is_one_line(get, changes, says):
    status, headers, text = get("/answer", {**SMALL, **changes})
    assert status == 400, text
    assert headers["content-type"].startswith("text/plain")
    assert says in text
    assert "\n" not in text


def _answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_answer_is_that_of_planner_search(get, folder, planner, write_model, monkeypatch):
    """The same sentence, figures, plan and report for the same request."""
    write_model()
    monkeypatch.chdir(folder.parent)
    folder = folder.parent
    form = {"model": "model.py", "profile": "h100-sxm5-80gb", "gpus": "4", "global_batch": "16"}
    done = planner(
        "search", "model.py", "--profile", "h100-sxm5-80gb", "--gpus", 4, "--global-batch", 16,
        "--json", "--no-cache",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    asked = parse_form(form, folder)
    assert asked.command == (
        "planner search model.py --gpus 4 --profile h100-sxm5-80gb --global-batch 16"
    )
    from commands.page.answers import Answerer

    answerer = Answerer(time_limit_s=60)
    messages = shown(answerer, asked)
    assert [message["is_last"] for message in messages][-1]
    last = messages[-1]
    assert told["sentence"] in last["head"]
    for name, value in last["numbers"].items():
        assert told[name] == value, name
    assert told["certificate"]["considered"] > 0
    plan = json.loads(answerer.plan(asked, lambda fraction, doing: None))
    assert plan == json.loads(Path("plan.json").read_text())
    assert told["sentence"] in answerer.report(asked, lambda fraction, doing: None)


def test_a_search_that_lasts_shows_the_best_so_far_and_goes_on(folder, monkeypatch):
    """The first look has a plan and the gap that is left; the last answer is that of a search that
    nobody looked at."""
    from commands.page import answers

    asked = parse_form({**SMALL, "gpus": "8", "layers": "8", "global_batch": "64"}, folder)
    monkeypatch.setattr(answers, "MOMENT_S", 0.0)
    first, last = shown(answers.Answerer(time_limit_s=60), asked)
    assert (first["is_last"], last["is_last"]) == (False, True)
    assert first["numbers"]["step_s"] >= last["numbers"]["step_s"]
    assert "the search goes on" in first["head"]
    assert "not looked at" in first["head"]
    assert "not looked at" not in last["head"]
    monkeypatch.setattr(answers, "MOMENT_S", 60.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "another"))
    (alone,) = shown(answers.Answerer(time_limit_s=60), asked)
    assert alone["numbers"] == last["numbers"]
    assert alone["chosen"] == last["chosen"]


def test_an_answer_comes_in_lines_and_a_report_and_a_plan_with_it(get):
    status, headers, text = get("/answer", {**SMALL, "pp": "2"})
    assert (status, headers["content-type"]) == (200, "application/x-ndjson")
    last = _answers(text)[-1]
    assert last["kind"] == "answer"
    assert last["is_last"]
    assert last["chosen"]["pp"] == "2"
    assert set(last["figures"]) == {"timeline", "memory"}
    assert "Bottleneck: pp rank" in last["head"]
    assert "Stages of the plan" in last["rest"]
    status, headers, text = get("/report", {**SMALL, "pp": "2"})
    assert status == 200
    assert "'unsafe-inline'" in headers["content-security-policy"]
    assert "Where the step goes" in text
    status, _, text = get("/plan.json", {**SMALL, "pp": "2"})
    assert json.loads(text)["pp"] == 2


def test_what_does_not_fit_is_told_in_words(get):
    status, _, text = get("/answer", {**SMALL, "memory_limit": "0.6"})
    assert status == 200
    (told,) = _answers(text)
    assert told["kind"] == "nothing fits"
    assert "--memory-limit" in " ".join(told["reasons"])
    assert get("/report", {**SMALL, "memory_limit": "0.6"})[0] == 400


def test_the_worker_stops_for_a_newer_question_and_survives_a_model_that_ends_it(folder):
    """A search of seconds is left at its next node; what the next question gets is its own."""
    (folder / "ends.py").write_text(
        "import os\nos._exit(3)\ndef model(): ...\ndef batch(size): ...\n"
    )
    large = {**SMALL, "layers": "80", "hidden": "8192", "heads": "64", "gpus": "512",
             "global_batch": "2048", "ffn_hidden": "28672"}  # fmt: skip

    async def last_of(worker: Worker, form: dict[str, str]) -> dict[str, Any]:
        messages = [m async for m in worker.run("answer", parse_form(form, folder)) if m]
        return messages[-1]

    async def play() -> None:
        worker = Worker(time_limit_s=600, most_s=600)
        try:
            long = worker.run("answer", parse_form(large, folder))
            async for message in long:
                if message is not None and message["kind"] == "progress":
                    break
            await long.aclose()
            process = worker._process
            assert (await last_of(worker, SMALL))["kind"] == "answer"
            assert worker._process is process
            told = await last_of(worker, {**SMALL, "model": "ends.py"})
            assert "has ended" in told["error"]
            assert (await last_of(worker, SMALL))["kind"] == "answer"
            worker._most_s = 0.0
            assert "given up" in (await last_of(worker, large))["error"]
        finally:
            worker.close()

    asyncio.run(play())


def test_what_the_command_refuses(planner, folder, monkeypatch):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = planner("ui", "--no-browser", "--port", port)
        assert "already in use" in done.complaint
    assert "inside the working folder" in planner("ui", "--no-browser", "/etc/passwd").complaint
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'planner[ui]'" in planner("ui", "--no-browser").complaint


@pytest.fixture
def address(folder) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of `planner ui` in a process of its own, and the process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "ui", "--port", "0", "--no-browser"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S{20,}", process.stdout.readline())
        assert found is not None
        yield found[0], process
    finally:
        process.kill()
        process.communicate()


def test_a_browser_shows_the_plan_and_sliders_change_it(address, tmp_path):
    if BROWSER is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    found, process = address
    start = found + "&" + urlencode(SMALL)
    with Browser(tmp_path / "browser", dark=True) as browser:
        browser.open(start)
        browser.wait("document.documentElement.dataset.answers == 1")
        browser.wait("document.documentElement.dataset.drawn == 2")
        sentence = "document.querySelector('.sentence').textContent"
        assert "on 2 NVIDIA H100" in browser.run(sentence)
        browser.run("document.getElementById('gpus-slider').focus()")
        browser.press("ArrowRight", 39)
        browser.wait("document.documentElement.dataset.answers == 2")
        assert "on 4 NVIDIA H100" in browser.run(sentence)
        assert browser.run("document.getElementById('gpus').value") == "4"
        assert "gpus=4" in browser.run("location.search")
        assert browser.run("document.querySelectorAll('#head .change').length") > 0
        slider = "document.getElementById('memory_limit-slider')"
        browser.run(f"{slider}.focus()")
        browser.press("Home", 36)
        browser.wait("document.documentElement.dataset.answers == 3")
        assert browser.run("document.getElementById('memory_limit').value") == "3.95"
        browser.run("document.getElementById('gpus').value = 'x'")
        browser.run(
            "document.getElementById('gpus').dispatchEvent(new Event('input', {bubbles: true}))"
        )
        browser.wait("document.getElementById('status').className == 'wrong'")
        assert "--gpus x was given" in browser.run("document.getElementById('status').textContent")
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.run(wide) <= 0
        # The refused question is told in the console by the browser itself.
        others = [text for text in browser.complaints if "status of 400" not in text]
        assert others == []
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert stderr == ""
