"""Formats exchanged between trainers and engines: routed experts of rollouts, and weights.

Both sides import the formats from here, and neither imports the other.
"""
