"""Client side of an environment: sessions on OpenReward servers and validation of their answers.

Input: a server's address, its tasks and tools.  Every answer has a time limit and a size limit.  Output:
typed results and rewards, or an error from :mod:`orhpc.errors` for an invalid answer.
"""
