"""Utilities for this process and machine: ports, devices, private folders, secrets, text for terminals.

Bottom layer: imports only :mod:`orhpc.errors`; nothing here knows about runs.
"""
