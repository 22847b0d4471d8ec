"""The HTTP server: ``create_app(backend)`` for an ASGI host, ``serve(backend, config)`` to run it."""

from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import serve

__all__ = ["ServerConfig", "create_app", "serve"]
