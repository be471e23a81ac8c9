"""Shared-memory regions that clients registered, and checks of the free memory.

May import core, errors and config. A front end pins a piece of a region for a request, and the request's release lets
it go; versions of models never come by here.
"""
