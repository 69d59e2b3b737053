"""Planning: placement of ranks, engines and workers, and the memory they need.

Consumes: a config, the shape of a model, the devices of a node.  Produces: numbers and placements; prints
nothing and starts nothing.
"""
