"""Slots: regions of host memory that hold one snapshot each, where they live, and how much there may be."""
