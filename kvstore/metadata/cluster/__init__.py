"""Health and events of the whole cluster, as the metadata server sees them."""
