"""Parsers of the metadata that exporters write into a model's file or beside it.

Each returns an `ExportedMetadata`: which layouts of `plugins.vision.layouts` the model may have, class names, input
size and image parameters. All texts are as hostile as the file.
"""
