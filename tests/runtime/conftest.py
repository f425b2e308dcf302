"""Engines of one rank run in the test process itself; none leaves its process group behind."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _own_process_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
