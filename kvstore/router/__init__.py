"""The router: an OpenAI-compatible front before several engines, which sends each request where its prefix lies and room is."""
