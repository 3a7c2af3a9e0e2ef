"""The block index as the server uses it: lookups on the event loop, changes on one thread."""
