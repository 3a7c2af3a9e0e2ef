"""``kvstore top``: live statistics of a running store."""
