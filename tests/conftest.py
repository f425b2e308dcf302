"""The folder of `tests.captures`, made once for all worker processes of a session."""

import atexit
import os
import shutil
import tempfile

# Workers and the ranks they start inherit the environment of the first process, which imports
# this file before it starts them.
if "PLANNER_TEST_CAPTURES" not in os.environ:
    os.environ["PLANNER_TEST_CAPTURES"] = tempfile.mkdtemp(prefix="planner-captures-")
    atexit.register(shutil.rmtree, os.environ["PLANNER_TEST_CAPTURES"], ignore_errors=True)
