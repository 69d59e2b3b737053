"""Trainer ranks: Ray actors that hold the policy, update it and send its weights to the engines.

Consumes: rollouts of a step, packed into a batch.  Waits for: the other ranks, in collectives with
deadlines.  Produces: updated weights, step metrics, commits.  Never imports :mod:`orhpc.launch` or
:mod:`orhpc.rollout`.
"""
