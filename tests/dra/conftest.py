"""Fixtures of the tests with a real API server, scheduler and controllers: `make test-dra`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / name) for name in ("", "unit")]

from cluster import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "FPGA_DRA" in os.environ:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs programs of Kubernetes: make test-dra"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.end()
