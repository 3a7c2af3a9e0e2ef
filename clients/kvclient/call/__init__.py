"""One call of an engine: its bounds, its thread, and the parts that all calls of a client share."""
