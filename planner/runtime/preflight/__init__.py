"""Checks of a cluster before a plan trains on it: `preflight`.

In come a plan, a script, and the rates that the plan was priced with (data: this room prices
nothing); out goes a `Report`: a line for each check, and a line for each problem. Read in this
order:

    preflight.py    a node's launcher: meets the others (`meeting`), compares what they are
                    (`facts`), starts its ranks, and makes the report of what these found
    rank.py         a rank: reaches every other rank (`reach`), does so through the backend that
                    trains (`pairs`), times each group's exchanges (`timing`), its memory and clock
    exchanges.py    which groups exchange what, in rounds of groups that share no rank
    report.py       what is a problem (`planner.nodes.node_links` says of which node slow links are)

Every wait has a limit, and what is told at its end names who did not come. The number of rounds
grows with the number of nodes, and of ranks for the shortest messages; never with its square.
"""

from planner.runtime.preflight.exchanges import BETWEEN_NODES, Exchange, PlannedRates
from planner.runtime.preflight.preflight import preflight
from planner.runtime.preflight.report import Report

__all__ = ["BETWEEN_NODES", "Exchange", "PlannedRates", "Report", "preflight"]
