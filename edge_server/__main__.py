"""`python -m edge_server` does what the command `edge-server` does."""

from edge_server.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
