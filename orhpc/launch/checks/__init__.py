"""The checks before a job starts and before a node joins.

:mod:`~orhpc.launch.checks.checklist` has the one ordered list, used by ``orhpc check``, ``--dry-run``, a
submission and the first node.  A check raises an error of :mod:`orhpc.errors` with one line, or returns its
finding.  Nothing here starts a process of the run; neither torch nor Ray is imported.
"""
