"""What all tests share: the folder of `tests.captures`, and a thread for each test process."""

import atexit
import gc
import os
import random
import shutil
import sys
import tempfile

import pytest

pytest_plugins = ["tests.ledger"]

# Modules stay: while they are imported nothing is garbage, and afterwards nobody need look at them.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws follows from the test, not from chance or from those before it."""
    random.seed(0)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed(0)
    if torch := sys.modules.get("torch.random"):
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leave what tests are made of out of all collections."""
    gc.freeze()
    gc.enable()


# Workers and the ranks they start inherit the environment of the first process, which imports
# this file before it starts them.
if "PLANNER_TEST_CAPTURES" not in os.environ:
    os.environ["PLANNER_TEST_CAPTURES"] = tempfile.mkdtemp(prefix="planner-captures-")
    atexit.register(shutil.rmtree, os.environ["PLANNER_TEST_CAPTURES"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _single_thread():
    """Tensors of tests are tiny, and there are as many test processes as cores: more threads only
    wait for each other, busily. Processes that tests start have their own number.
    """
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_process_group():
    """An engine of one rank, in the test process itself, leaves no group behind for other tests."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def forked_ranks(monkeypatch):
    """Ranks that this process starts fork from a server that has torch: see `tests.forked`."""
    from tests.forked import fork_ranks

    fork_ranks(monkeypatch)
