"""Authentication and authorization over gRPC: tokens, the interceptor that checks them, per-tenant limits."""
