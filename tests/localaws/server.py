"""The local AWS as a server: `python -m tests.localaws.server [PORT]`, until it is stopped.

When the server is ready, it prints the environment variables that another shell needs. Every serving fleet that is
deployed there has agents and users (`visitors.py`), so that rollouts run to their ends.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

# botocore requires credentials to create a client; the server does not check them.
_WHO: Final = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": "us-east-2"}
_LONG: Final = 5.0  # seconds: the interval at which the CDK polls a stack


@contextmanager
def local_aws(port: int = 0) -> Iterator[dict[str, str]]:
    """Serve a fresh account and return the environment that points to it; this process has that environment meanwhile.

    Providers, state machines and functions call the same server.
    """
    from moto import backends
    from moto.moto_api._internal.models import moto_api_backend
    from moto.server import ThreadedMotoServer

    from tests.localaws.formation.models import Stacks
    from tests.localaws.install import install

    before, run = dict(os.environ), Stacks.run
    os.environ.update({name: value for name, value in _WHO.items() if name not in os.environ})
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no log line for each request
    install()
    moto_api_backend.reset()
    known = frozenset(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: known  # moto lists the folder for each request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    # The CDK accepts template URLs only with the host name `localhost`.
    os.environ.update({"AWS_ENDPOINT_URL": f"http://localhost:{port}", "MOTO_PORT": str(port)})
    Stacks.run = staticmethod(_beside)
    try:
        region = os.environ["AWS_DEFAULT_REGION"]
        yield {**{name: os.environ[name] for name in ("AWS_ENDPOINT_URL", *_WHO)}, "AWS_REGION": region}
    finally:
        server.stop()
        moto_api_backend.reset()  # what another test does in this process with moto alone begins with an empty account
        Stacks.run = staticmethod(run)
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    from tests.localaws.visitors import inhabited

    with (
        local_aws(int(sys.argv[1]) if len(sys.argv) > 1 else 0) as environment,
        inhabited(environment["AWS_DEFAULT_REGION"]),
    ):
        # moto logs a Choice state whose variable is absent as an error.
        logging.getLogger("moto").setLevel(logging.CRITICAL)
        sys.stdout.write("".join(f"export {name}={value}\n" for name, value in environment.items()))
        sys.stdout.flush()
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()


def _beside(job: Callable[[], None]) -> None:
    """Run a stack operation in a thread, and return when it has ended or after five seconds.

    AWS returns at once. A client that finds the operation unfinished polls again after seconds, and nearly all
    operations take less than a tenth of one here.
    """
    work = threading.Thread(target=job, daemon=True)
    work.start()
    work.join(_LONG)


if __name__ == "__main__":
    main()
