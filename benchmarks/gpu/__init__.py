"""The sections of gpu_check.py. Each is a function from a Context to its Items, run in a process of its own."""
