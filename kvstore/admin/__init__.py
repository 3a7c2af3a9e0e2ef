"""The admin REST: what the store does and how to change it; a thin shell over the gRPC of metadata server and nodes."""
