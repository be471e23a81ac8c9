"""Comparison of the runtimes, devices and precisions that can run a model here. Each candidate runs in a process."""
