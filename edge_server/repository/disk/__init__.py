"""Folders of models on disk: scans, watching, fingerprints, files that are still copied, and files of a load call.

A scan enters the desired state; nothing here knows what a configuration means.
"""
