"""Path of the demo picture, a JPEG file with a portrait. For its origin see demo.md."""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).with_name("demo.jpg")
