"""The node daemon of one host: it stores, loads, writes back and publishes blocks."""
