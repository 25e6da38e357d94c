"""The local AWS as a server: `python -m tests.cloud.server [PORT]`, until it is stopped.

Prints one line, the address, when it answers. Providers call the same server, so the environment names it first.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

# botocore reads them when a client is made; nobody checks them.
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_DEFAULT_REGION": "us-east-2"}


def main() -> None:
    os.environ.update({name: value for name, value in _CREDENTIALS.items() if name not in os.environ})
    from moto.server import ThreadedMotoServer

    from tests.cloud.formation.models import Stacks
    from tests.cloud.install import install

    install()
    Stacks.run = staticmethod(_beside)
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    # The command line takes template addresses of this very spelling only.
    address = f"http://localhost:{server.get_host_and_port()[1]}"
    os.environ["AWS_ENDPOINT_URL"] = address
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    server.stop()


def _beside(job: Callable[[], None]) -> None:
    threading.Thread(target=job, daemon=True).start()


if __name__ == "__main__":
    main()
