"""The block index as the server uses it: lookups on the event loop; changes by registration and publishing on one thread."""
