"""Names of the environments that come with the project; importing this loads none of them."""

BUNDLED: dict[str, str] = {
    "arithmetic": "orhpc.rollout.environments.arithmetic:Arithmetic",
    "letters": "orhpc.rollout.environments.letters:Letters",
    "reasoning-gym": "orhpc.rollout.environments.gym:ReasoningGym",
    "treasure": "orhpc.rollout.environments.treasure:Treasure",
}
"""Name to class."""
