"""Comparison of the runtimes, devices and precisions that can run a model here. Each candidate has its own process."""
