"""Formats of leaves, images, metadata, records and typed values. Opens no file or region; needs no torch."""
