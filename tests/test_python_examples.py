"""The scripts of examples/python run as they are, and as cells of a notebook."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "python"
SHOWS = {
    "plan": "gap to the lower bound: 0.0%",
    "what_if": "tokens_per_s",
    "rows": "tp=4 pp=2:",
}


def test_each_script_is_shown_to_run():
    assert {file.stem for file in FOLDER.glob("*.py")} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_a_script_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert SHOWS[name] in told
    assert "none" not in told.lower()


@pytest.mark.parametrize("name", SHOWS)
def test_a_script_is_a_notebook_of_cells(name):
    """Jupytext's percent format: a header, and cells that begin with a title in Markdown."""
    text = (FOLDER / f"{name}.py").read_text()
    assert "format_name: percent" in text
    cells = text.split("\n# %%")[1:]
    assert cells[0].startswith(" [markdown]\n# # ")
    assert len(cells) >= 3
    for cell in cells:
        if not cell.startswith(" [markdown]"):
            compile(cell.partition("\n")[2], name, "exec")
