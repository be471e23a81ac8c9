"""What the server tells about itself while it runs: log lines, metrics, events.

May import core, errors and config. Everything here is passed in to whoever reports, never fetched from a global (the
standard library's loggers excepted). No request passes through this folder: metrics are read from the versions'
statistics when somebody asks.
"""
