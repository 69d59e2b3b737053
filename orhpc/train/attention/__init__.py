"""Attention over packed sequences: several samples in one row, each attending only to itself."""
