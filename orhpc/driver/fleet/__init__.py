"""The running parts of an attempt, as the driver holds them: trainer ranks, engines, workers.

Each class here wraps the Ray actors of one part.  Calls to them are awaited together, the first
failure wins, and whatever Ray raises becomes one of our classes, so that the loop in ``driver.py``
reads like prose and the policy table always applies.
"""

from orhpc.driver.fleet.actors import node_ids, wait_for_nodes
from orhpc.driver.fleet.engines import Engines
from orhpc.driver.fleet.trainers import Trainers
from orhpc.driver.fleet.workers import WorkerHandle, start_workers

__all__ = ["Engines", "Trainers", "WorkerHandle", "node_ids", "start_workers", "wait_for_nodes"]
