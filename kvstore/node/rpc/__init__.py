"""gRPC services of a node, and the state of its engines' sessions."""
