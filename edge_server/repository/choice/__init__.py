"""Choice of the runtime for a model version, and what this machine has learned about it: measured times, first openings,
and the version whose load ended the server.
"""
