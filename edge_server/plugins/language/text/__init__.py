"""Text with token engines: a request to tokens, tokens to text, tool calls and JSON schemas; `session` is the entry."""
