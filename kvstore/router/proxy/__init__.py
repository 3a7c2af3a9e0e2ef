"""One request: attempts on engines, retries, and the response to the client."""
