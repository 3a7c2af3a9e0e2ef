"""Replays of workloads against a real store through the client, and the demo. Every loaded byte is checked."""
