"""Simulated engines: prefill and decode units, dispatch of requests, jobs."""
