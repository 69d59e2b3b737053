"""Planning: which rank, engine and worker goes where, and what memory it needs.

Consumes: a config, the shape of a model, the devices of a node.  Produces: numbers and placements; prints
nothing and starts nothing.
"""
