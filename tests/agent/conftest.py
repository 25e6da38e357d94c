"""A local AWS that other processes can reach."""

from collections.abc import Iterator

import pytest

from tests.artifact_store.samples import s3_server
from tests.localaws.install import install


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    install()
    with s3_server() as environment:
        yield environment
