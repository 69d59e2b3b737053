"""This process and this machine: ports, devices, folders of one's own, secrets, text for terminals.

The ground floor, above :mod:`orhpc.errors` alone: nothing here knows what a run is.
"""
