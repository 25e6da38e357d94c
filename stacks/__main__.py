"""`python -m nxpipe.stacks`: the CDK app, as the cdk.json that `nxpipe init` writes starts it."""

import sys
from collections.abc import Sequence

from nxpipe.pipeline.util.errors import MissingSoftware
from nxpipe.pipeline.util.exit_codes import INTERRUPTED, SOFTWARE, USAGE


def run(arguments: Sequence[str]) -> int:
    if arguments:
        sys.stderr.write("python -m nxpipe.stacks takes no arguments; `npx cdk synth` runs it, as cdk.json states.\n")
        return USAGE.number
    try:
        from nxpipe.stacks import app
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.partition(".")[0] in {"", "nxpipe"}:
            raise
        missing = MissingSoftware(name, "The CDK app", "run: pip install 'nxpipe[cdk]'")
        sys.stderr.write(f"{missing}\n")
        return SOFTWARE.number
    return app.run()


if __name__ == "__main__":
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED.number
    sys.exit(code)
