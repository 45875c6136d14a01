"""Tests against other programs, each in an environment of its own: `make test-peers`, `make test-llama-cpp`."""
