"""Benchmarks are run by hand; what they import moves nevertheless."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_benchmark_finds_what_it_imports():
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert "predict_cpu" in names
    # A script's own folder is on its path.
    code = (
        "import importlib, sys\nsys.path.append('benchmarks')\n"
        "for name in {!r}: importlib.import_module('benchmarks.' + name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.format(names)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_drawings_of_the_documentation_are_those_of_their_script(tmp_path, monkeypatch):
    """All are shown on the page, with a text for whoever does not see them."""
    from benchmarks import concept_drawings

    page = (ROOT / "docs" / "concepts.md").read_text()
    monkeypatch.setattr(concept_drawings, "FOLDER", tmp_path)
    concept_drawings.main()
    drawn = {file.name: file.read_text() for file in tmp_path.glob("*.svg")}
    kept = {file.name: file.read_text() for file in (ROOT / "docs" / "concepts").glob("*.svg")}
    assert drawn == kept
    for name, text in drawn.items():
        assert re.search(rf"!\[.{{40,}}\]\(concepts/{name}\)", page)
        assert re.search(r"<title .*</title>\n<desc .{40,}</desc>", text)
