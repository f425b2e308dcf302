"""Every part of a step and of memory has a name for people, and no two share theirs."""

from __future__ import annotations

from dataclasses import fields

from costmodel.memory.parts import MemoryParts
from search.report.words import MEMORY_WORDS, PART_MEANING, PART_WORDS
from tests.cli.render.views import step_path

NOT_OF_THE_DEVICE = {"host_bytes"}
OLD = {"bubble_s", "pp_comm_s"}
"""Of the rank that ends last, in files from before causes were told."""


OF_A_RANK = {"waited_s"}
"""Told of each rank; over all of them it is a part of `messages_s`."""


def test_every_part_of_a_step_has_a_word_and_a_meaning():
    assert {*step_path().by_rank_s} <= {*PART_WORDS}
    assert {*step_path().parts} <= {*PART_WORDS}
    assert {*PART_WORDS} - OLD - OF_A_RANK == {*PART_MEANING}


def test_parts_of_one_table_have_words_of_their_own():
    told = [word for name, word in PART_WORDS.items() if name not in OLD]
    assert len({*told}) == len(told)
    assert len({*PART_MEANING.values()}) == len(PART_MEANING)
    assert len({*MEMORY_WORDS.values()}) == len(MEMORY_WORDS)


def test_parts_of_memory_are_those_that_add_up_to_the_total():
    parts = {name: 2**place for place, name in enumerate(MEMORY_WORDS)}
    assert MemoryParts(**parts).total == sum(parts.values())
    assert {each.name for each in fields(MemoryParts)} - NOT_OF_THE_DEVICE == {*MEMORY_WORDS}


def test_words_do_not_swap_tensor_and_data_parallel():
    assert PART_WORDS["tp_comm_s"].startswith("tensor parallel")
    assert PART_WORDS["dp_comm_s"].startswith("data parallel")
    assert "gradients" in PART_MEANING["dp_comm_s"]
    assert "tp" in PART_MEANING["tp_comm_s"]
