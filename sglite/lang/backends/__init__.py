"""Backends other than the engine: servers and services reached over the network, and a mock."""
