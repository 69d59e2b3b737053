"""The run directory: its paths, commits, events, records, and what to do when the filesystem refuses."""

from orhpc.rundir.paths import BUFFER, MANIFEST, CommitName, RunDir
from orhpc.rundir.sealed import sync_folder, write_atomic

__all__ = ["BUFFER", "MANIFEST", "CommitName", "RunDir", "sync_folder", "write_atomic"]
