"""A CPU rank's freed memory stays with it, so that a step does not fault its pages in again."""

import os
import subprocess
import sys

import pytest

from planner.runtime.process.host.heap import ask_for_large_pages

FAULTS = """
import ctypes, resource, sys
from planner.runtime.process.host.heap import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
libc.free.argtypes = (ctypes.c_void_p,)

def use(num_bytes):
    blocks = [libc.malloc(num_bytes) for _ in range(4)]
    for block in blocks:
        libc.memset(block, 1, num_bytes)
    for block in blocks:
        libc.free(block)

use(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="tells glibc, which other systems don't have")
def test_a_second_use_of_memory_faults_in_no_pages():
    """C: 64 MiB are 16,384 pages (fewer if the system joins them); kept, none comes anew."""
    assert _faults("kept") < 16 < _faults("given back")


def test_large_pages_are_asked_for_unless_the_user_chose(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")  # so that it is put back
    del os.environ["THP_MEM_ALLOC_ENABLE"]
    ask_for_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    ask_for_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
