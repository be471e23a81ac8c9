"""Reports of the server about itself: log lines, metrics, events, traces, and messages to systemd.

May import core, errors and config. Callers get the objects of this folder as arguments; the only globals are the
standard library's loggers. No request passes through this folder: metrics are read from the statistics of the versions
at each scrape.
"""
