"""The driver's handles of an attempt's running parts: trainer ranks, engines, workers.

Each class here wraps the Ray actors of one part.  Calls to them are awaited concurrently and the first
failure is raised.  Errors of Ray are converted to classes of :mod:`orhpc.errors`, so that the policy table
always applies.
"""

from orhpc.driver.fleet.actors import node_ids, wait_for_nodes
from orhpc.driver.fleet.engines import Engines
from orhpc.driver.fleet.trainers import Trainers
from orhpc.driver.fleet.worker_handle import WorkerHandle
from orhpc.driver.fleet.workers import Workers, WorkerSetup

__all__ = ["Engines", "Trainers", "WorkerHandle", "WorkerSetup", "Workers", "node_ids", "wait_for_nodes"]
