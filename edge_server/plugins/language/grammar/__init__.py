"""What constrains a model's answer: the conversion for an engine's library."""
