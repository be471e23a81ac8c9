"""Looks at a box as an operator would: what it is, what models can run on, what is in the way, what to do about it.

Nothing here serves, and nothing is changed. Files are read below a root that tests replace; each runtime is tried in a
process of its own, for one that was built for another processor ends its process.
"""
