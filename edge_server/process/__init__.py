"""The server process: `composition_root` builds every part, and `server` starts, drains and stops them.

`systemd_supervision` speaks to systemd. Imported by `cli` alone.
"""
