"""Which models an axis of sequences divides, and how far a search goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import LayoutError
from planner.language.layout import sequences
from planner.language.layout.sequences import check_hands_on_sequences, longest_sequence, most_parts
from tests.sharding.models import captured


def test_blocks_that_hand_on_sequences_of_sixteen():
    graph = captured("gpt")
    assert longest_sequence(graph) == 16
    check_hands_on_sequences(graph, "cp", 4)
    with pytest.raises(LayoutError, match=r"cp=3 divides sequences, and block .* does not divide"):
        check_hands_on_sequences(graph, "cp", 3)


def test_blocks_that_hand_on_no_sequences():
    """The message has the name of the axis that was asked for."""
    graph = captured("mlp")
    assert longest_sequence(graph) == 0
    with pytest.raises(LayoutError, match=r"it is not \[batch, sequence, hidden\]; use xp=1"):
        check_hands_on_sequences(graph, "xp", 2)


def test_a_search_leaves_each_rank_enough_positions(monkeypatch):
    graph = captured("gpt")
    assert most_parts(graph) == 0
    monkeypatch.setattr(sequences, "LEAST_POSITIONS", 4)
    assert most_parts(graph) == 4
    assert most_parts(replace(graph, blocks=())) == 0
