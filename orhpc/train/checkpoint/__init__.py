"""Commits of trainer state: written in shards by all ranks, read under any layout, exported.

Consumes: state of a backend.  Produces: files of a commit folder, which :mod:`orhpc.rundir.commits`
finalizes, or a Hugging Face folder.
"""
