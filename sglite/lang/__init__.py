"""The DSL: programs that call a model many times. Start at ``api`` for the surface, ``interpreter`` for the meaning."""
