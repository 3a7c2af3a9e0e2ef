"""gRPC glue that servers and clients share: errors as status, servers, channels, TLS, proto to value types."""
