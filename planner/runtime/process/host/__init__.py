"""What a rank's process is given before it trains: cores, memory of its heap, who ends it."""
