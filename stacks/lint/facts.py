"""Facts about a project that lint rules need beyond its templates, from nxpipe.toml, lock files and the price list."""

from pathlib import Path

from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.config.fleets import DRAINED_BEFORE_THE_END, CapacityBlock
from nxpipe.stacks.lint.costs import load_prices
from nxpipe.stacks.lint.finding import Accepted, Facts, Window
from nxpipe.stacks.locks import known_images, lock_of, unlocked_images


def facts_of(config: Config, folder: Path) -> Facts:
    """`folder` is that of nxpipe.toml, where relative paths of it start."""
    groups = config.cluster.groups if config.cluster else ()
    blocks = [each.capacity for each in (*config.fleets, *groups) if isinstance(each.capacity, CapacityBlock)]
    standbys = [fleet.standby for fleet in config.fleets if isinstance(fleet, ServingFleet) and fleet.standby]
    lock = lock_of(config, folder)
    return Facts(
        project=config.project.name,
        blocks={each.id: Window(each.start, each.end - DRAINED_BEFORE_THE_END) for each in blocks},
        images=known_images(lock),
        given_images=frozenset(each.image for each in standbys),
        unlocked_images=unlocked_images(config, lock),
        budget=config.budget.monthly,
        prices=load_prices(),
    )


def accepted_by(config: Config) -> list[Accepted]:
    return [Accepted(each.rule, each.resource, each.reason, each.expires) for each in config.acknowledge]
