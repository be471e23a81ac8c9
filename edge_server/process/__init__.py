"""The server process: `composition_root` builds every part, and `server` starts, drains and stops them.

`systemd_supervision` sends messages to systemd. Imported by `cli` and `ray`, and by programs that embed the server
(`embedded`).
"""
