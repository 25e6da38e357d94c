"""What every test may rely on: no user's cache, no hub, no AWS account, no NXPIPE_* variable leaks in."""

import gc
import os
import signal
from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
_NUMBERS: Final = count()  # pytest would find the next one by listing all folders, for each test again

# A busy machine is no defect: no test fails for being slow. Each run draws other examples; `make test-all` draws more.
settings.register_profile("nxpipe", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("nxpipe"), max_examples=200)
settings.load_profile("nxpipe")

# What a shell runs in the background is deaf to Ctrl-C, and so is all that it starts: tests send it to commands.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is imported: torch, CDK and moto are a lot for the collector to go through again and again


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    collected = yield
    gc.freeze()  # what is imported now stays
    gc.enable()
    return collected


@pytest.fixture(autouse=True)
def sealed_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp(f"home{next(_NUMBERS)}", numbered=False)
    for name in list(os.environ):
        if name.startswith(("NXPIPE_", "AWS_")):
            monkeypatch.delenv(name)
    for name, folder in (("HOME", ""), ("XDG_CACHE_HOME", "cache"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(name, str(home / folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
