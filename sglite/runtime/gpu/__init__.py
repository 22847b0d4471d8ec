"""The runner of a GPU: captured decode steps, sampling on the device, and steps that do not wait for each other."""
