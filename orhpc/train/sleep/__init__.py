"""Offload trainer state to host memory while engines use the device, and reload it for the update."""
