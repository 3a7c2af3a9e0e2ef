"""The distributed index: records in Valkey Cluster (or Redis), shared by any number of metadata servers."""
