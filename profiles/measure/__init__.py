"""A machine, measured: worker ranks visit probes in rounds, records become a profile.

Read `measure` first, then `session`, `rounds` and `visits`; `probes` and `grid` say what is
measured, `nodes`, `workers` and `worker` start ranks, `timing` is what runs inside one rank.
"""
