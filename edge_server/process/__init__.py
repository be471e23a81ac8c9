"""Process of the server: `composition_root` creates and connects all parts, and `server` starts, drains and stops them.

`systemd_supervision` sends messages to systemd. Imported by `cli` and `ray`, and by programs that embed the server
(`embedded`).
"""
