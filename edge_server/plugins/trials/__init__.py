"""Trials of a model: a process of its own opens it and runs it on chosen inputs, and its outputs and times are compared
with those of other runtimes, devices and precisions.

`optimize`, `add` and the measurement of an idle server ask for them. Not a plugin: it has no settings and no commands.
"""
