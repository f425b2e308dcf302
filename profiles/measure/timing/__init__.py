"""Inside one rank of a measurement: clocks, calls and their timing."""
