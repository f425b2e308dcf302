"""The cyclic collector is held back inside, and as it was afterwards."""

from __future__ import annotations

import contextlib
import gc

import pytest

from planner.collector import no_gc


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(KeyError), no_gc():
            with no_gc():
                pass
            assert not gc.isenabled()  # the inner one leaves it to the outer
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
