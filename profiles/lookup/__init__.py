"""A profile's answers: the time of an op or a collective, measured, interpolated or fitted."""
