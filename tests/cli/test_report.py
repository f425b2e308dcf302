"""`planner show --html`: the report in a browser, without one, and what is refused."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from plotly import graph_objects as go

import cli
from planner.language.plan import load_plan, save_plan
from planner.timeline import save_timeline
from tests import captures
from tests.cli.conftest import MODEL_FILE

SEARCH = ("--profile", "h100-sxm5-80gb", "--gpus", "8", "--global-batch", "16")
CHARTS = ("timeline", "memory", "tradeoff", "costs", "roofline")

BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--enable-logging=stderr", "--window-size=1366,900",
)  # fmt: skip

PROBE = """
<script>
(async () => {
  const found = { errors: window.__errors };
  while (!document.documentElement.dataset.drawn) await new Promise((go) => setTimeout(go, 50));
  found.drawn = Number(document.documentElement.dataset.drawn);
  found.marks = {};
  for (const chart of document.querySelectorAll(".chart"))
    found.marks[chart.id] = chart.querySelectorAll("svg path").length;
  const width = () => {
    const [low, high] = document.getElementById("timeline")._fullLayout.xaxis.range;
    return high - low;
  };
  found.whole = width();
  const press = async (by) => {
    const button = document.querySelector(`[data-zoom=timeline][data-by=${by}]`);
    button.focus();
    found.focused = document.activeElement === button;
    button.click();
    await new Promise((go) => setTimeout(go, 200));
  };
  await press("in");
  found.zoomed = width();
  await press("all");
  found.back = width();
  const detail = document.getElementById("detail");
  const blocks = [...document.querySelectorAll(".block")];
  blocks[blocks.length - 1].focus();
  found.detail = detail.textContent;
  const list = document.querySelector("[data-choice=memory]");
  const shown = () => document.getElementById("memory").data.map((trace) => trace.visible);
  found.before = shown();
  if (list) {
    list.value = "1";
    list.dispatchEvent(new Event("change", { bubbles: true }));
    await new Promise((go) => setTimeout(go, 200));
  }
  found.after = shown();
  found.sideways = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const said = document.createElement("pre");
  said.id = "probe";
  said.textContent = JSON.stringify(found);
  document.body.append(said);
})();
</script>
"""
WATCH = """<script>
window.__errors = [];
addEventListener("error", (event) => __errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => __errors.push(String(event.reason)));
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A folder with a model, a plan that a search found, with a front, and its report."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.capture.module.capture_module", captures.capture_module)
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        Path("model.py").write_text(MODEL_FILE.format(layers=6, width=64, body="pass"))
        fixed = ("--pp", "2", "--tp", "2", "--microbatch-size", "2", "--schedule", "1f1b")
        pinned = ("--pin", "layers.*.weight: S(0)@tp")
        assert cli.run(["search", "model.py", *SEARCH, *fixed, *pinned]) == 0
        plan = load_plan("plan.json")
        point = {"label": "leaner", "step_s": 1.0, "peak_bytes": 2**30, "num_devices": 8}
        told = {**plan.estimate, "front": [point]}
        save_plan(plan.model_copy(update={"estimate": told}), Path("plan.json"))
        assert cli.run(["show", "plan.json", "model.py", "--html", "out/report.html"]) == 0
        yield folder


@pytest.fixture
def report(folder, planner, monkeypatch) -> Path:
    """The report, with its folder as the present one."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder / "out" / "report.html"


def _figures(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_report_is_one_file_with_text_for_every_chart(report):
    text = report.read_text()
    own = re.sub(r"<script>/\*\*\s*\n?\s*\* plotly.js.*?</script>", "", text, flags=re.S)
    assert len(own) < len(text) / 2
    assert text.count("* plotly.js v") == 1  # one copy
    assert not re.search(r'(?:src|href)="(?!#|data:)', own)  # nothing is loaded
    figures = _figures(text)
    assert set(figures) == set(CHARTS)
    for name, figure in figures.items():
        assert figure["data"], name
        colours = json.dumps(figure).replace('"@ink"', '"#000"').replace('"@surface"', '"#fff"')
        go.Figure(json.loads(colours))  # raises for a property that plotly has not
        assert f'id="{name}" role="img" aria-label="' in own
    assert own.count("The numbers as a table") == len(CHARTS) + 2  # the model, the network
    assert "prefers-color-scheme: dark" in own
    for runner in load_plan("plan.json").estimate["runners_up"]:
        assert runner["label"] in own
    assert "leaner" in json.dumps(figures["tradeoff"])


def test_the_report_has_the_plans_numbers(report):
    """The last job ends, and memory is highest, where the estimate says so."""
    figures, estimate = _figures(report.read_text()), load_plan("plan.json").estimate
    ends = [
        start + length
        for trace in figures["timeline"]["data"]
        for start, length in zip(trace["base"], trace["x"], strict=True)
    ]
    # The table of jobs begins when the batch is there.
    jobs_s = estimate["step_s"] - estimate["time"]["inputs_s"]
    assert max(ends) / 1e3 == pytest.approx(jobs_s, rel=1e-3)
    by_rank: dict[str, list[list[float]]] = {}
    for trace in figures["memory"]["data"]:
        if "stackgroup" in trace:
            by_rank.setdefault(trace["stackgroup"], []).append(trace["y"])
    heights = [max(map(sum, zip(*rows, strict=True))) for rows in by_rank.values()]
    assert max(heights) == pytest.approx(estimate["peak_bytes"] / 2**30, rel=1e-3)
    shares = [float(text) for text in re.findall(r'"number">([\d.]+)%', report.read_text())]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_a_recorded_run_is_drawn_beside_the_prediction(report, planner):
    from costmodel import estimate
    from costmodel.compare import as_rank_timelines
    from planner.capture.source.capture_cache import load_graph
    from profiles import load_profile

    plan = load_plan("plan.json")
    found = estimate(load_graph(Path("model.py")), load_profile("h100-sxm5-80gb"), plan)
    save_timeline(as_rank_timelines(found.timeline), "run")
    asked = ("show", "plan.json", "model.py", "--html", "both.html")
    done = planner(*asked, "--run", "run")
    assert done.code == 0, done.stderr
    rows = _figures(Path("both.html").read_text())["timeline"]["layout"]["yaxis"]["categoryarray"]
    assert "rank 1 measured (1)" in rows
    assert "no timeline in nowhere" in planner(*asked, "--run", "nowhere").complaint


def test_a_report_without_what_it_needs_is_refused(planner, report):
    assert "without a model file" in planner("show", "plan.json", "--html", "r.html").complaint
    assert "it is for a report" in planner("show", "plan.json", "--run", "run").complaint
    over = planner("show", "plan.json", "model.py", "--html", "plan.json")
    assert "would replace what is read" in over.complaint


@pytest.mark.parametrize("style", ["light", "dark"])
def test_a_browser_draws_all_of_it(report, tmp_path, style):
    """Loaded from a file: no errors, all charts have marks, buttons and lists do what they say."""
    if BROWSER is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    text = report.read_text().replace("<head>", "<head>" + WATCH, 1)
    page = tmp_path / "probed.html"
    page.write_text(text.replace("</body>", PROBE + "</body>"))
    dark = ["--blink-settings=preferredColorScheme=0"] * (style == "dark")
    done = subprocess.run(
        [BROWSER, *FLAGS, *dark, f"--user-data-dir={tmp_path / 'browser'}",
         "--virtual-time-budget=30000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert not re.findall(r"CONSOLE.*", done.stderr), done.stderr
    said = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert said is not None, done.stderr[-2000:]
    found = json.loads(html.unescape(said[1]))
    assert found["errors"] == []
    assert found["drawn"] == len(CHARTS)
    assert min(found["marks"].values()) > 3, found["marks"]
    assert found["zoomed"] == pytest.approx(found["whole"] / 2)
    assert found["back"] == pytest.approx(found["whole"])
    assert found["focused"]
    assert "layers.5" in found["detail"]
    assert "split over tp" in found["detail"]
    assert found["before"] != found["after"]
    assert found["sideways"] <= 0
