"""Sending weights to the engines: buckets, FP8 blocks, senders.

Consumes: whole tensors of a :class:`~orhpc.train.weights.source.WeightSource`, which a backend is.
Produces: buckets in memory that engines map or receive.
"""
