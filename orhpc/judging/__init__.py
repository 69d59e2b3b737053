"""Judging a model's answers, in processes that can be killed.

Consumes an answer and what it is compared with; waits for the comparison for seconds at most; produces a
verdict.  Its modules import neither servers nor models, so that such a process starts quickly.
"""
