"""Connections of a client: to the metadata server, to the node of this host, and to other nodes."""
