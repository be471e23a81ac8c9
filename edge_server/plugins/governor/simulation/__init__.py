"""Simulation and replay of the governor's control policy, on a thermal model of a machine. Not part of serving."""
