"""Answers of searches shared by the tests of one session: each question is searched once.

Tests of commands search the same few tiny chains again and again, each in a folder of its own. To
the code that is tested a first answer looks searched now, and a second one kept, as in a cache that
was empty when the test began.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from search import result_cache
from search.request import SearchResult
from tests.captures import FOLDER


def share_answers(patch: pytest.MonkeyPatch) -> None:
    """Let `find_plan_once` keep its answers in the session's folder, until the patch is undone."""
    read = result_cache._read
    asked: set[Path] = set()

    def read_as_new(entry: Path) -> SearchResult | None:
        kept = read(entry)
        if kept is not None and entry not in asked:
            kept = replace(kept, was_kept=False)
        asked.add(entry)
        return kept

    patch.setattr(result_cache, "_read", read_as_new)
    patch.setattr(result_cache, "cache_dir", lambda: Path(os.environ[FOLDER]))
