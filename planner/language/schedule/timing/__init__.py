"""A job table over time: when each job runs, what is alive then, and which messages it sends.

Comes in: a `Schedule`, and seconds of its jobs (`job_seconds`). Goes out: starts and ends
(`simulate`, on the flat lists of `job_table`), activations in flight (`in_flight`), messages in the
order of both ends (`communication`), and which activations wait on the host meanwhile (`offloads`).
"""
