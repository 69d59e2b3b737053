"""Offloading: trainer state that leaves the device while engines use it, and comes back for the update."""
