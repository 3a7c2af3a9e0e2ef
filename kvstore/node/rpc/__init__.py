"""gRPC services of a node and what they keep per engine session."""
