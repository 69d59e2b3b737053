"""The config of a run: the schema, one file per section, and reading it from YAML files and overrides."""

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
