"""Token engines, the adapters to libraries that compute the tokens of a language model, and the readers of the model's
files."""
