"""The config of a run: a schema, a section a file, and the YAML files and overrides it comes from."""

from orhpc.config.environment import EnvironmentSettings
from orhpc.config.schema import (
    CheckpointSettings,
    Config,
    EvaluationSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    TrainSettings,
)

__all__ = [
    "CheckpointSettings",
    "Config",
    "EnvironmentSettings",
    "EvaluationSettings",
    "ModelSettings",
    "RolloutSettings",
    "RunSettings",
    "TrainSettings",
]
