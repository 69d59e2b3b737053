"""A sweep: runs of one config with different values of some settings, submitted as one job array.

Consumes: a config and overrides with several values each.  Produces: a folder with ``sweep.json`` and one run
directory per element, and an array whose elements are requeued and resumed as any other run.
"""
