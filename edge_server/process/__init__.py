"""The server process: `composition_root` builds every part, and `server` starts, drains and stops them.

`systemd_supervision` sends messages to systemd. Only `cli` imports this folder.
"""
