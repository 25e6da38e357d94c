"""The local AWS as a server: `python -m tests.localaws.server [PORT]`, until it is stopped.

When it answers it prints what another shell needs to use it.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

# botocore reads them when a client is made; nobody checks them.
_WHO: Final = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": "us-east-2"}
_LONG: Final = 5.0  # seconds: what the command line waits before it asks a second time


@contextmanager
def local_aws(port: int = 0) -> Iterator[dict[str, str]]:
    """A fresh account behind an address: the environment that leads there, in which this process is meanwhile, too.

    Providers, state machines and functions call the same server.
    """
    from moto import backends
    from moto.moto_api._internal.models import moto_api_backend
    from moto.server import ThreadedMotoServer

    from tests.localaws.formation.models import Stacks
    from tests.localaws.install import install

    before, run = dict(os.environ), Stacks.run
    os.environ.update({name: value for name, value in _WHO.items() if name not in os.environ})
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request helps nobody
    install()
    moto_api_backend.reset()
    known = frozenset(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: known  # looked up on the disk for each request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    # The command line takes template addresses of this very spelling only.
    os.environ.update({"AWS_ENDPOINT_URL": f"http://localhost:{port}", "MOTO_PORT": str(port)})
    Stacks.run = staticmethod(_beside)
    try:
        region = os.environ["AWS_DEFAULT_REGION"]
        yield {**{name: os.environ[name] for name in ("AWS_ENDPOINT_URL", *_WHO)}, "AWS_REGION": region}
    finally:
        server.stop()
        Stacks.run = staticmethod(run)
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    with local_aws(int(sys.argv[1]) if len(sys.argv) > 1 else 0) as environment:
        sys.stdout.write("".join(f"export {name}={value}\n" for name, value in environment.items()))
        sys.stdout.flush()
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()


def _beside(job: Callable[[], None]) -> None:
    """The request is answered when the work has ended, or has taken long. AWS answers at once; but whoever then finds
    the work unfinished asks again only after seconds, and nearly all work is done in a tenth of one here.
    """
    work = threading.Thread(target=job, daemon=True)
    work.start()
    work.join(_LONG)


if __name__ == "__main__":
    main()
