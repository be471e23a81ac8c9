"""Shared-memory regions that clients registered, and checks of the free memory.

May import core, errors and config. A front end pins a piece of a region for a request and unpins it at the request's
release. Model versions never use this package.
"""
