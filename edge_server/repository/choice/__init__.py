"""Choice of the runtime for a model version, and what this machine has learned about it.

That is measured times, files that were opened once before, and the version whose load ended the server.
"""
