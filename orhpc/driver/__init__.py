"""The process that controls a run: it starts trainers, engines and workers as Ray actors and trains.

Consumes: the config, the placement that the launcher wrote, the newest commit.  Waits for: rollouts from the
workers, updates from the trainers, the launcher's request to stop.  Produces: training steps, commits,
events, metrics.  :mod:`orhpc.driver.loop` is the algorithm; the other modules support it.
"""
