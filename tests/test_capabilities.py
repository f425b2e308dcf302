"""Each capability has a test that names it, or is told to be open."""

from __future__ import annotations

from pathlib import Path

from tests.capabilities import IDS, NOT_BUILT, proofs


def test_each_capability_is_proven_or_open() -> None:
    found = proofs(Path(__file__).parent)
    proven = {name for name in IDS if found[name]}
    assert proven | NOT_BUILT.keys() == set(IDS)
    assert not proven & NOT_BUILT.keys(), "what a test proves is not open"
