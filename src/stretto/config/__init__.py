"""The typed configuration of a run: TOML plus dotted overrides in, one frozen tree out. No torch here."""

from __future__ import annotations

from stretto.config.base import Section
from stretto.config.checks import require_source, warnings
from stretto.config.dump import difference, dump_toml
from stretto.config.load import default_source, load_config, preset_names
from stretto.config.overrides import parse_options, split_words
from stretto.config.resume import COMPARED, MAY_CHANGE_ON_RESUME, MAY_MOVE, check_resumable, resume_warnings
from stretto.config.schedules import ScheduleConfig
from stretto.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
    DraftConfig,
    EngineConfig,
    EvalConfig,
    FleetConfig,
    HistoryConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ReuseConfig,
    RewardConfig,
    SamplingConfig,
    TrackConfig,
)

__all__ = [
    "COMPARED",
    "MAY_CHANGE_ON_RESUME",
    "MAY_MOVE",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DraftConfig",
    "EngineConfig",
    "EvalConfig",
    "FleetConfig",
    "HistoryConfig",
    "LearnerConfig",
    "LoraConfig",
    "ModelConfig",
    "ReuseConfig",
    "RewardConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "Section",
    "TrackConfig",
    "check_resumable",
    "default_source",
    "difference",
    "dump_toml",
    "load_config",
    "parse_options",
    "preset_names",
    "require_source",
    "resume_warnings",
    "split_words",
    "warnings",
]
