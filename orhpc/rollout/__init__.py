"""From a task to a scored rollout: sessions, agents, engines.

Consumes: tasks of environments, tokens of engines.  Produces: rollouts with log-probabilities, routed
experts and rewards, as :mod:`orhpc.types` defines them.  Never imports :mod:`orhpc.launch` or
:mod:`orhpc.train`.
"""
