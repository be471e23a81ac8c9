"""Routing of requests: the version that takes a request now, canary shares, model variants, requests that wait for a
load."""
