"""``sglite bench`` and ``sglite report``: load on a server or an engine, and what its figures mean."""
