"""SLURM: submitting a job, querying the scheduler, and deciding whether a job is requeued.

Consumes: configs, ``sbatch``, ``squeue``, ``scontrol`` and ``sinfo``.  Produces: the batch script, a job, and
the verdict on an attempt that ended: requeue, finish or stop.  It never imports :mod:`orhpc.launch.node`.
"""
