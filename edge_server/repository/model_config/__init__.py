"""Configuration of a model version: read from config.pbtxt, completed from the model's file, checked, and made a ModelSpec."""
