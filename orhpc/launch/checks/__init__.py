"""What is checked before a job starts or a node takes part.

:mod:`~orhpc.launch.checks.checklist` holds the one ordered list, used by ``orhpc check``, ``--dry-run``, a
submission and the first node.  A check raises an error of :mod:`orhpc.errors` with one line, or returns what
it found.  Nothing here starts a process of the run; neither torch nor Ray is imported.
"""
