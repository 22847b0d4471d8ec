"""Tools to test programs without a model."""

from sglite.lang.backends.mock import EVERYTHING, MockBackend

__all__ = ["EVERYTHING", "MockBackend"]
