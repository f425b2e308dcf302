"""Lower bounds of a step's time and of a rank's memory, each cheaper than an estimate."""
