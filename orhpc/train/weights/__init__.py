"""Weights on their way to the engines: buckets, FP8 blocks, the senders."""
