"""Engines of one rank run in the test process itself."""

from __future__ import annotations

import pytest
import torch

from tests import captures, reaches


@pytest.fixture(autouse=True)
def _shared_captures(monkeypatch):
    """`planner.apply` and `verify` export an equal model once a session, here as in ranks."""
    monkeypatch.setattr("planner.runtime.state.optimizers.reach._reach", reaches.reach_of)
    for module in ("planner.capture", "planner.capture.module"):
        monkeypatch.setattr(f"{module}.capture_module", captures.capture_module)


@pytest.fixture(autouse=True)
def _own_default_dtype():
    """A model built in another dtype would be another model to processes that start later."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
