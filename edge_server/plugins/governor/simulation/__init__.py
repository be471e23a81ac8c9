"""Simulation and replay of the control policy on a thermal model of a machine. Not part of serving."""
