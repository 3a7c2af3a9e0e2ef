"""The framed TCP transport: wire format, server, and client with a connection pool."""
