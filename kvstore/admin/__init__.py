"""Admin REST API: shows and changes the state of the store through the gRPC of metadata server and nodes."""
