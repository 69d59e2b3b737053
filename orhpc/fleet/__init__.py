"""The running parts of an attempt, as the driver holds them: trainer ranks, engines, workers.

Each class here wraps the Ray actors of one part.  Calls to them are awaited together, the first
failure wins, and whatever Ray raises becomes one of our classes, so that the loop in ``driver.py``
reads like prose and the policy table always applies.
"""

from orhpc.fleet.actors import node_ids, wait_for_nodes
from orhpc.fleet.engines import Engines
from orhpc.fleet.trainers import Trainers
from orhpc.fleet.workers import WorkerHandle, start_workers

__all__ = ["Engines", "Trainers", "WorkerHandle", "node_ids", "start_workers", "wait_for_nodes"]
