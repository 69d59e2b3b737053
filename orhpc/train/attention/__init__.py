"""Attention over packed sequences: several samples in one row, each seeing only itself."""
