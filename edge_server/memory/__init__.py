"""Shared-memory regions that clients registered, checks of the available memory, and malloc settings.

May import core, errors, config and protocol. A front end pins a piece of a region for a request and unpins it at the
request's release. Model versions use only `malloc_settings`.
"""
