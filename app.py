"""The CDK app: reads nxpipe.toml and makes the stacks that it describes.

`npx cdk synth` reads the file in the working directory; `npx cdk synth -c config=PATH` reads another.
"""

import os
import sys
from pathlib import Path

from aws_cdk import App, Environment

from pipeline.config import Config, ConfigInvalid, load_config
from pipeline.exit_codes import CONFIGURATION
from stacks.storage import StorageStack


def main() -> int:
    app = App()
    path = Path(app.node.try_get_context("config") or "nxpipe.toml")
    try:
        config = load_config(path, os.environ)
    except ConfigInvalid as invalid:
        sys.stderr.write(f"{invalid}\n")
        return CONFIGURATION.number
    add_stacks(app, config)
    app.synth()
    return 0


def add_stacks(app: App, config: Config) -> None:
    """A project without account or region gives templates that deploy wherever the credentials at hand point."""
    project = config.project
    where = Environment(account=project.account, region=project.region)
    StorageStack(app, f"{project.name}-storage", project=project.name, env=where, termination_protection=True)


if __name__ == "__main__":
    sys.exit(main())
