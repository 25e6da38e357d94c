"""nxpipe.toml: its model, its faults, and the texts about it. The one description that every room reads."""

from pipeline.config.faults import ConfigInvalid, Fault
from pipeline.config.fleets import ServingFleet, TrainingFleet
from pipeline.config.load import load_config
from pipeline.config.models import Model
from pipeline.config.origins import Origin, Setting, origins
from pipeline.config.reference import configuration_page, field_help, json_schema
from pipeline.config.root import Config
from pipeline.config.sections import Build, Guards, Project, Rollout, Signing, Store, TrustedKey, Verify

__all__ = [
    "Build",
    "Config",
    "ConfigInvalid",
    "Fault",
    "Guards",
    "Model",
    "Origin",
    "Project",
    "Rollout",
    "ServingFleet",
    "Setting",
    "Signing",
    "Store",
    "TrainingFleet",
    "TrustedKey",
    "Verify",
    "configuration_page",
    "field_help",
    "json_schema",
    "load_config",
    "origins",
]
