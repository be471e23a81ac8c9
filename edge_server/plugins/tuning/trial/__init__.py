"""Comparison of the runtimes, devices and precisions that can run a model on this machine. Each candidate runs in a
process."""
