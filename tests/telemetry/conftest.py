"""Fixture that waits for the effect of another thread."""

from __future__ import annotations
