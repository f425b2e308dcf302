"""Pictures for the documentation: of a real report, docs/report.png, and of the page, docs/ui.png.

    python -m docs.build.report_picture [report] [page]

The report is of examples/llama.py on 64 H100 in a pipeline of 4, the page of Llama 3 8B there, in
its dark style. Both are taken with chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import cli
from tests.browser import BROWSER, Browser

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 1200, 1840
PAGE_WIDTH, PAGE_HEIGHT = 1366, 1500
ASKED = (
    "--gpus", "64", "--profile", "h100-sxm5-80gb", "--global-batch", "256", "--pp", "4",
)  # fmt: skip


def main() -> None:
    if BROWSER is None:
        sys.exit("no chromium is installed: apt-get install chromium")
    wanted = sys.argv[1:] or ["report", "page"]
    with tempfile.TemporaryDirectory() as folder:
        if "report" in wanted:
            _report(Path(folder))
        if "page" in wanted:
            _page(Path(folder))


def _report(folder: Path) -> None:
    plan, report = folder / "plan.json", folder / "report.html"
    model = str(ROOT / "examples" / "llama.py")
    for arguments in (
        ["search", model, *ASKED, "--out", str(plan)],
        ["show", str(plan), model, "--html", str(report)],
    ):
        if code := cli.run(arguments):
            sys.exit(code)
    with Browser(folder / "browser", width=WIDTH, height=HEIGHT) as browser:
        browser.open(report.as_uri())
        browser.wait("document.documentElement.dataset.drawn == 5")
        browser.picture(ROOT / "docs" / "report.png")


def _page(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "ui", "--port", "0", "--no-browser", *ASKED[:4]],
        cwd=ROOT / "examples", env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"http\S+", process.stdout.readline())
        assert found is not None
        size = {"width": PAGE_WIDTH, "height": PAGE_HEIGHT}
        with Browser(folder / "page", **size, dark=True) as browser:
            for _ in range(2):  # the second time the answer is kept, and the process warm
                browser.open("about:blank")
                browser.open(found[0] + "&pp=4")
                browser.wait("document.documentElement.dataset.answers == 1", 600)
            browser.wait("document.documentElement.dataset.drawn == 2")
            browser.picture(ROOT / "docs" / "ui.png")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


if __name__ == "__main__":
    main()
