"""Jobs that are killed, starved and cut off, and what must be true of them afterwards."""
