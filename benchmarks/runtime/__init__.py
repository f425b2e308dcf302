"""The runtime on this machine's CPUs: its speed beside other libraries, and that it trains right.

In come small models (`layers`, `families_models`); out come times, and what differs from a single
process.
"""
