"""Random numbers that a graph would freeze: Python's and NumPy's draws, and seeds set in
forward.
"""
