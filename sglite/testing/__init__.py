"""Tools to test programs without a model: a scripted backend, and recordings of real ones."""

from sglite.lang.backends.mock import EVERYTHING, MockBackend
from sglite.testing.recording import Recorder, Replayer, record, replay

__all__ = ["EVERYTHING", "MockBackend", "Recorder", "Replayer", "record", "replay"]
