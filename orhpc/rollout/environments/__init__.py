"""Environments that come with the project, served by the real OpenReward server.

``environments.NAME.serve`` in a config names one of :data:`BUNDLED`, or ``package.module:Class``;
``serve_options`` are the fields of its ``Options``.
"""

BUNDLED: dict[str, str] = {
    "arithmetic": "orhpc.rollout.environments.arithmetic:Arithmetic",
    "letters": "orhpc.rollout.environments.letters:Letters",
    "reasoning-gym": "orhpc.rollout.environments.gym:ReasoningGym",
    "treasure": "orhpc.rollout.environments.treasure:Treasure",
}
"""Name to class."""
