"""docs/errors.md lists all refusals, and most have a test of their text.

After a change of messages, write the page anew: WRITE_PAGES=1 pytest tests/test_messages.py
"""

from __future__ import annotations

from collections import defaultdict

from tests.messages import HOLE, ROOT, Message, all_messages, commands_of, is_asserted
from tests.pages import check_page

LEAST_ASSERTED = 0.8
"""Part of all messages whose text a test has; it may rise."""

INTRO = """# Refusals

What planner says when something given breaks a rule: one line on stderr, exit code 2. The line
tells what was given, the rule, and what to try. `{hole}` stands for a value. From Python the same
texts are raised as errors of `planner.errors`, with names of arguments where flags stand here.

{num_messages} places refuse something; the text of {num_asserted} of them stands in a test. Behind
each text are the commands that can reach it, where they are fewer than {most}; the others are
reached by most commands or through `planner.apply`.

This page is written by `WRITE_PAGES=1 pytest tests/test_messages.py` from the source.
"""

MOST = 8
"""Commands that are named behind a message."""


def page() -> str:
    """Return the page's text."""
    messages = all_messages()
    rooms: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        rooms[message.error].append(message)
    commands = commands_of()
    parts = [
        INTRO.format(
            hole=HOLE,
            num_messages=len(messages),
            num_asserted=sum(map(is_asserted, messages)),
            most=MOST,
        )
    ]
    for error in sorted(rooms):
        lines = dict.fromkeys(
            f"- {message.template.replace('<', '&lt;')}{_reached(message, commands)}"
            for message in rooms[error]
        )
        parts.append("\n".join([f"## {error}", "", *sorted(lines), ""]))
    return "\n".join(parts)


def _reached(message: Message, commands: dict[str, frozenset[str]]) -> str:
    named = sorted(commands.get(message.module, ()))
    return f" *({', '.join(named)})*" if 0 < len(named) < MOST else ""


def test_the_page_of_refusals_is_up_to_date():
    check_page(ROOT / "docs" / "errors.md", page())


def test_most_refusals_have_a_test_of_their_text():
    messages = all_messages()
    without = [message for message in messages if not is_asserted(message)]
    share = 1 - len(without) / len(messages)
    listed = "\n".join(f"{each.module}:{each.line} {each.template}" for each in without)
    assert share >= LEAST_ASSERTED, listed


def test_refusals_that_say_nothing_to_try_are_few():
    """A message has a second part behind its rule: `;`, or `:` with what is possible, or `so`."""
    bare = [
        message
        for message in all_messages()
        if not any(mark in message.template for mark in MARKS)
        and not message.template.endswith(HOLE)
    ]
    listed = "\n".join(f"{each.module}:{each.line} {each.template}" for each in bare)
    assert len(bare) <= MOST_BARE, listed


MARKS = (";", ", so ", "did you mean", "use ", "give ", "must be ", "must both be ")
MOST_BARE = 0
