"""Generates scored rollouts from tasks: sessions, agents, engine clients.

Input: tasks of environments and tokens sampled by engines.  Output: rollouts with log-probabilities, routed
experts and rewards, as defined in :mod:`orhpc.types`.  Never imports :mod:`orhpc.launch` or
:mod:`orhpc.train`.
"""
