"""Sending weights to the engines: buckets, FP8 blocks, senders."""
