"""`python -m cli`: the `planner` command of a source tree that is not installed."""

from cli import main

main()
