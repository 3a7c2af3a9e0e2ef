"""Load generator against a running store: a cold pass that stores, a warm pass that loads, and every byte checked."""
