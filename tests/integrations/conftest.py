"""Engines of one rank run in the test process itself, as in tests of the runtime."""

from tests.runtime.conftest import _shared_captures

__all__ = ["_shared_captures"]
