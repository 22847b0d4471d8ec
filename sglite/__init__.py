"""sglite: programs that call a language model many times, and the runtime that executes them."""

__version__ = "0.1.0"
