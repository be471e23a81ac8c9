"""Constraints of a text: grammars for the engines, and the check of what they wrote."""
