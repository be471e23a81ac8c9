"""Parts of the server that its core does not need, one folder each."""
