"""Block events: the in-memory log and the subscriptions that read it."""
