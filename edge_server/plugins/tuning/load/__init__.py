"""Load tests: send requests to a running server over HTTP and gRPC, measure it, and search for the best
configuration."""
