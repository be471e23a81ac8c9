"""Entry point of `python -m edge_server`, which is the same as the command `edge-server`."""

from edge_server.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
