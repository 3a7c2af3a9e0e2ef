"""The node daemon: what one host holds, and how it is stored, loaded, made durable and published."""
