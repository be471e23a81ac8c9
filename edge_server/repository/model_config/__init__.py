"""Configuration of a model version: read from config.pbtxt, completed from its file, checked, made a ModelSpec."""
