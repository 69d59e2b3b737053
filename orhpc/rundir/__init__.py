"""The run directory: its paths, commits, events, records, and retries when the filesystem fails."""

from orhpc.rundir.paths import BUFFER, MANIFEST, CommitName, RunDir
from orhpc.rundir.sealed import sync_folder, write_atomic

__all__ = ["BUFFER", "MANIFEST", "CommitName", "RunDir", "sync_folder", "write_atomic"]
