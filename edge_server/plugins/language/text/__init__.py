"""Text generation on a token engine: turns requests into tokens and tokens into text, with tool calls and JSON
schemas."""
