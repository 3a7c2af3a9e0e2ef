"""Load generator against a running store: a cold pass stores, a warm pass looks up, loads and stores. Every byte is checked."""
