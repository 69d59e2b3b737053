"""Reinforcement-learning post-training of language models as SLURM batch jobs.

Folders, from the top; each imports only those below it, and the import contracts in pyproject.toml say so:

==============  ==========================================================================================
commands        what a person types: ``orhpc status``, ``plan``, ``report``, ``export``, ...
driver          one process a run: the training loop and the actors that it holds
rollout         engines, environments, chat formats: from a task to a scored rollout
launch          a SLURM job, its nodes, and what is checked before it starts
train           trainer ranks: batch, loss, optimizer, commits, weights for the engines
plan            layout, memory and placement, computed before anything starts
models          models as files describe them: shapes, families, folders, chat formats
environments    tasks that the job serves itself, and the base class for your own
config          the schema of a run's config and the files that it comes from
rundir          the run directory: commits, events, records
wire            what travels between trainers and engines: routed experts, weights
process         this process and this machine: ports, secrets, devices
types, errors   the words that all of them share
==============  ==========================================================================================

``launch``, ``rollout`` and ``train`` never import each other.
"""
