"""What a node reports to the metadata server: replicas, health, anti-entropy."""
