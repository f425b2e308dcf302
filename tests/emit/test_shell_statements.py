"""A script cut into statements runs as the script does: bash itself is the referee."""

from __future__ import annotations

import random
import subprocess

import pytest

from planner.emit.shell_statements import commands_of, statements_of

WORDS = [
    "echo one", "echo 'a; b # c'", 'echo "x && y"', "echo $((1 + 2))", 'echo "${HOME:+set}"',
    "A=(1 2\n  3)", 'echo "${A[@]}"', "echo a\\;b", 'echo "two\nlines"', "echo it\\'s", "B=4",
    "echo $B # said", "true || echo no", "false && echo no", "echo p | tr p q", "echo 2>&1 r",
    "echo longer \\\n  line", "echo a#b", "{ echo in; echo brackets; }", "(cd /; pwd)",
    ": <<END\nnot; this\nEND", "cat <<< 'here; word'", 'echo "$(echo "deep; er")"',
]  # fmt: skip


def said(script: str) -> str:
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.parametrize("seed", range(4))
def test_statements_say_in_bash_what_the_script_says(seed):
    draw = random.Random(seed)
    for _ in range(5):
        parts = draw.sample(WORDS, 8)
        script = "# begins\n" + "".join(
            part + ("\n" if "#" in part or "<<" in part else draw.choice(["\n", "; ", "\n\n"]))
            for part in parts
        )
        found = statements_of(script)
        # (`A=(...)` and what stands in braces are one; a here-document leaves `:` behind.)
        assert len(found) == len(parts) + ("{ echo in; echo brackets; }" in parts) * 2
        assert said("\n".join(found)) == said(script), script


@pytest.mark.parametrize(
    ("statement", "commands"),
    [
        ("a && b || c", [("", "a"), ("&&", "b"), ("||", "c")]),
        ("a | b & c", [("", "a"), ("|", "b"), ("&", "c")]),
        ("a 2>&1 | b &> log", [("", "a 2>&1"), ("|", "b &> log")]),
        ("a '&&' \"|\" \\& b", [("", "a '&&' \"|\" \\& b")]),
        ("(a && b) | c", [("", "(a && b)"), ("|", "c")]),
    ],
)
def test_commands_of_a_statement(statement, commands):
    assert commands_of(statement) == commands


def test_branches_of_case_end_in_statements_of_their_own():
    script = "case $1 in\n a) echo x ;;\n *) echo y; echo z ;;\nesac"
    assert ";;" in statements_of(script)
    assert "echo z" in statements_of(script)


def test_lines_of_another_system_end_as_others():
    assert statements_of("a\r\nb; c\r\n") == ["a", "b", "c"]


def test_a_document_of_indented_lines_ends_where_its_word_is():
    assert statements_of("cat <<-END > f\n\tx; y\n\tEND\nb") == ["cat  > f", "b"]
