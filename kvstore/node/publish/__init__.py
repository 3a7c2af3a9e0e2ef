"""Reports of a node to the metadata server: replicas, health, anti-entropy."""
