"""Reports: what a search found, for people.

In come a finished search, or a request and its result; out come sentences and tables. Read:

    runners_up  the next best configurations, and which parts make them slower
    explain     fixed choices against the best plan, in parts that add up
    infeasible  nothing fits: the plan of least memory, and the limit under which it fits
    remedies    what else would make it fit, each with the plan that a search found
    pareto      the front of time, memory, devices and cost: searches under less and less memory
    overview    a plan at a glance: rates, stages, memory, the step by cause; `network`: its links
    report_numbers  what a report of a plan draws
"""
