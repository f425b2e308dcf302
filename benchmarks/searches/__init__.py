"""What searches and schedules cost, and how good they are.

In come models by their sizes (`cases`), captured once and kept; out come seconds, gaps and memory
of searches, each in a process of its own. `search` is the one to compare before and after a change.
"""
