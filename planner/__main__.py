"""The `planner` command, also as ``python -m planner``.

Its modules are planner's own, even where a folder of the user's on PYTHONPATH has some under the
same names (`cli.py`, `search/`, ...).
"""

from __future__ import annotations

import importlib

from planner.users_modules import put_ours_first


def main() -> None:
    """Run the command that the arguments name, and end the process."""
    put_ours_first()
    importlib.import_module("cli").main()


if __name__ == "__main__":
    main()
