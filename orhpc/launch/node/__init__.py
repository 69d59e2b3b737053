"""The launcher: one process on each node of a job, ``python -m orhpc.launch.node``.

Consumes: SLURM's variables, signals from the batch shell, the run directory.  Waits for: the driver and Ray
on the first node, the first node's files on the others.  Produces: a Ray cluster, environment servers, the
driver, and the outcome of the attempt.  It outlives all of them, so it must never import torch, and Ray only
in the processes that it starts.
"""
