"""Temperatures from the raw counts of a thermal camera: an example of a runtime that edge_server does not ship."""
