"""The router: one OpenAI-compatible address in front of several engines; it prefers engines that hold a request's prefix."""
