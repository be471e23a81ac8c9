"""Runtimes besides the core's own: one file or folder for each, with a function `make(name) -> Backend`."""
