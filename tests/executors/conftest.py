from collections.abc import Iterator

import pytest

from tests.executors.ray_cluster import RayCluster, ray_cluster


@pytest.fixture(scope="package")
def ray_nodes() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster
