"""The drawings of docs/concepts.md."""

import re
from pathlib import Path

from docs.build import concept_drawings

ROOT = Path(__file__).parents[2]


def test_drawings_of_the_documentation_are_those_of_their_script(tmp_path, monkeypatch):
    """All are shown on the page, with a text for whoever does not see them."""
    page = (ROOT / "docs" / "concepts.md").read_text()
    monkeypatch.setattr(concept_drawings, "FOLDER", tmp_path)
    concept_drawings.main()
    drawn = {file.name: file.read_text() for file in tmp_path.glob("*.svg")}
    kept = {file.name: file.read_text() for file in (ROOT / "docs" / "concepts").glob("*.svg")}
    assert drawn == kept
    for name, text in drawn.items():
        assert re.search(rf"!\[.{{40,}}\]\(concepts/{name}\)", page)
        assert re.search(r"<title .*</title>\n<desc .{40,}</desc>", text)
