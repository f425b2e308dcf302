"""A rank's process before it trains: device, process groups, cores, and who hears of its end.

In: what the launcher put into the environment. Out: a `Mesh` of process groups on a device. Read
`environment` and `device` first, then `groups`; `collectives` are a program's, on those groups.
`recorder` writes timelines, `watchdog` tells of hangs, `failures` and `ended` how ranks ended;
`host` gives a process its cores and its heap.
"""
