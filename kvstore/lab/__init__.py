"""Test beds of this project: real and fake engines, tiny models, a stub CUDA driver."""
