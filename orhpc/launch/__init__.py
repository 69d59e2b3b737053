"""From a config to a job: ``python -m orhpc.launch``.

Consumes: a config.  Produces: a submitted job, or with ``--local`` a run on this machine.  Needs neither
torch nor Ray, and never imports :mod:`orhpc.rollout` or :mod:`orhpc.train`.
"""
