"""A picture of a real report for the documentation: docs/report.png.

    python -m benchmarks.report_picture

Searches for examples/llama.py on 64 H100 in a pipeline of 4, draws the report and takes its picture
with chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cli

ROOT = Path(__file__).parent.parent
WIDTH, HEIGHT = 1200, 1560
ASKED = (
    "--gpus", "64", "--profile", "h100-sxm5-80gb", "--global-batch", "256", "--pp", "4",
)  # fmt: skip


def main() -> None:
    browser = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
    if browser is None:
        sys.exit("no chromium is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        plan, report = Path(folder) / "plan.json", Path(folder) / "report.html"
        model = str(ROOT / "examples" / "llama.py")
        for arguments in (
            ["search", model, *ASKED, "--out", str(plan)],
            ["show", str(plan), model, "--html", str(report)],
        ):
            if code := cli.run(arguments):
                sys.exit(code)
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
             "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
             "--disable-component-update", "--disable-sync", f"--user-data-dir={folder}/browser",
             "--virtual-time-budget=20000", f"--window-size={WIDTH},{HEIGHT}",
             f"--screenshot={ROOT / 'docs' / 'report.png'}", report.as_uri()],
            check=True, timeout=300,
        )  # fmt: skip


if __name__ == "__main__":
    main()
