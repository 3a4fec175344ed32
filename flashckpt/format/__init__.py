"""What bytes mean: leaves, images, metadata, records, typed values. Knows no file, no region, no torch."""
