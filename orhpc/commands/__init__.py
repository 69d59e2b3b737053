"""The user's commands, for a login node or a workstation; ``orhpc --help`` lists them.

Consumes: arguments, a config, a run directory.  Produces: text for a person, exit codes of
:mod:`orhpc.errors`.  Nothing imports this package, and it needs neither torch nor Ray: code that needs them
runs in a separate process.
"""
