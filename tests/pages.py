"""Pages of docs that tests write: compared, or written where WRITE_PAGES is set."""

from __future__ import annotations

import os
from pathlib import Path


def check_page(path: Path, text: str) -> None:
    """Raise AssertionError where a page is not this text; write it if WRITE_PAGES is set."""
    if os.environ.get("WRITE_PAGES"):
        path.write_text(text)
    assert path.exists(), f"write {path.name}: WRITE_PAGES=1 pytest"
    assert path.read_text() == text, f"{path.name} is not up to date: WRITE_PAGES=1 pytest"
