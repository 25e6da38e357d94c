"""nxpipe.toml: its schema, its faults and its reference page, for the commands, the stacks and the fleets."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxpipe.pipeline.config.endpoints import ModelEndpoint
    from nxpipe.pipeline.config.load import Origin, Setting, load_config, origins
    from nxpipe.pipeline.config.messages import ConfigInvalid, Fault
    from nxpipe.pipeline.config.models import Model
    from nxpipe.pipeline.config.reference import configuration_page, field_help, json_schema
    from nxpipe.pipeline.config.root import Config
    from nxpipe.pipeline.config.sections import Build, Guards, Project, Rollout, Signing, TrustedKey, Verify
    from nxpipe.pipeline.config.serving_fleet import ServingFleet
    from nxpipe.pipeline.config.store import Store
    from nxpipe.pipeline.config.store_section import load_store_section
    from nxpipe.pipeline.config.training_fleet import TrainingFleet

__all__ = [
    "Build",
    "Config",
    "ConfigInvalid",
    "Fault",
    "Guards",
    "Model",
    "ModelEndpoint",
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
    "load_store_section",
    "origins",
]

_HOMES = {
    "endpoints": ("ModelEndpoint",),
    "load": ("Origin", "Setting", "load_config", "origins"),
    "messages": ("ConfigInvalid", "Fault"),
    "models": ("Model",),
    "reference": ("configuration_page", "field_help", "json_schema"),
    "root": ("Config",),
    "sections": ("Build", "Guards", "Project", "Rollout", "Signing", "TrustedKey", "Verify"),
    "serving_fleet": ("ServingFleet",),
    "store": ("Store",),
    "store_section": ("load_store_section",),
    "training_fleet": ("TrainingFleet",),
}


def __getattr__(name: str) -> Any:
    """Import on first use: a command that only needs [store] does not import the tables of fleets."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)
