"""The client's side of an environment: sessions on OpenReward servers, and what they answer.

Consumes: a server's address, its tasks and tools.  Waits for: answers, each under a deadline and a size
limit.  Produces: typed results and rewards, or an error of :mod:`orhpc.errors` for what does not fit.
"""
