"""What a person types on a login node or at home; ``orhpc --help`` lists it.

Consumes: arguments, a config, a run directory.  Produces: text for a person, exit codes of
:mod:`orhpc.errors`.  Nothing imports this package, and it needs neither torch nor Ray: whatever does runs in
a process of its own.
"""
