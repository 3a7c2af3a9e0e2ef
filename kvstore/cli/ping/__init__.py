"""``kvstore ping``: round trips to the servers of a store."""
