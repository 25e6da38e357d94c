"""The CDK app of this checkout. A project that installs nxpipe starts it as `python -m nxpipe.stacks`."""

import sys

from nxpipe.stacks.app import run

if __name__ == "__main__":
    sys.exit(run())
