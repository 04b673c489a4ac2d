"""One process per rank that turns ScheduleBatch into tokens; it never sees a queue."""
