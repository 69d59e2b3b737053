"""SLURM: how a job is submitted, what the scheduler answers, and whether a job comes back.

Consumes: configs, ``sbatch``, ``squeue``, ``scontrol`` and ``sacct``.  Produces: the batch script, a job,
and the verdict on an attempt that ended: requeue, finish or stop.  Nothing of the nodes' own work is
imported here.
"""
