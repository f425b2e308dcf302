"""The space of plans: which degrees, microbatch sizes, schedules and ZeRO stages are legal.

In: a request, a model and a cluster. Out: shapes, which a search splits into configurations. Read
`configuration` (what these are), `shapes` (which there are), `request_checks` (choices that cannot
go together) and `job_tables` (what follows from a schedule, such as microbatches in flight).
"""
