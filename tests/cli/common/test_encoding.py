"""What an encoding of the output lacks is printed as what is like it."""

import io
import sys

import pytest

from commands.common.encoding import print_in_any_encoding
from commands.render.error_report import _write


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", b"--- ## +-7% a.b -> ? caf\xe9"),
        ("latin-1", b"--- ## \xb17% a\xb7b -> ? caf\xe9"),
        ("utf-8", "─── █▊ ±7% a·b → 中 caf".encode() + b"\xe9"),
    ],
)
def test_what_an_encoding_lacks_is_printed_as_what_is_like_it(monkeypatch, encoding, printed):
    """And names of files as the bytes that they are."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    print_in_any_encoding()
    print("─── █▊ ±7% a·b → 中 caf\udce9", end="", flush=True)
    assert out.getvalue() == printed


def test_a_report_names_files_that_are_not_utf_8(tmp_path):
    _write(tmp_path / "report.txt", "caf\udce9 ±")
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == "caf\\udce9 ±"
