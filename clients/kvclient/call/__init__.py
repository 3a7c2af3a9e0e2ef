"""One call of an engine: its bounds, its thread, and what all calls of a client share."""
