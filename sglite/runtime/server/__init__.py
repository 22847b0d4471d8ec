"""The HTTP server: ``app.create_app(backend)`` for an ASGI host, ``runner.serve(backend, config)`` to run it."""
