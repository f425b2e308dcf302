"""Engines of one rank run in the test process itself; none leaves its process group behind."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests import captures


@pytest.fixture(autouse=True)
def _shared_captures(monkeypatch):
    """`planner.apply` exports an equal model once a session, here as in ranks."""
    monkeypatch.setattr("planner.capture.capture_module", captures.capture_module)


@pytest.fixture(autouse=True)
def _own_process_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
