"""The metadata server: which nodes live, which replicas each key has, the longest prefix hit. Never on the data path."""
