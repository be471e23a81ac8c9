"""The server process: `composition` builds every part, `server` starts, drains and stops them, `supervision` speaks to
systemd. Imported by `cli` alone."""
