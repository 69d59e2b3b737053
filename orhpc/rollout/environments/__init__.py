"""Environments that come with the project, served by the real OpenReward server.

``environments.NAME.serve`` in a config names one of :data:`BUNDLED`, or ``package.module:Class``;
``serve_options`` are the fields of its ``Options``.
"""

from orhpc.bundled_environments import BUNDLED

__all__ = ["BUNDLED"]
