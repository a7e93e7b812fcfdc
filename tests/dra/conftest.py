"""Fixtures of the tests with a real API server, scheduler and controllers: `make test-dra`."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path += [
    str(Path(__file__).parents[1] / name)
    for name in ("", "unit", "unit/allocation", "integration", "kubelet")
]

import pods_node
from cluster import Cluster
from machine import Runtime


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that take namespaces and a kubelet are run by `pods_namespace.py`."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        inside = item.path.name.startswith(("test_pods", "test_chart"))
        if ("FPGA_KUBELET_SCRATCH" if inside else "FPGA_DRA") not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs programs of Kubernetes: make test-dra"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def classes(cluster: Cluster) -> Cluster:
    """The cluster, with the classes of deploy/dra and a template of each."""
    cluster.apply(pods_node.DEPLOY / "deviceclasses.yaml")
    for kind in ("region", "card"):
        request = {"name": "fpga", "exactly": {"deviceClassName": f"fpga-{kind}-ce489693"}}
        cluster.call("POST", f"{pods_node.NAMESPACED}/resourceclaimtemplates", {
            "metadata": {"name": f"a-{kind}"},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        })  # fmt: skip
    return cluster


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    runtime = Runtime()
    yield runtime
    runtime.process.end()


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[pods_node.Cluster]:
    """The one that a kubelet belongs to."""
    cluster = pods_node.Cluster()
    yield cluster
    cluster.end()


@pytest.fixture
def make_node(
    runtime: Runtime, whole_cluster: pods_node.Cluster
) -> Iterator[Callable[..., pods_node.Node]]:
    """Nodes of a test; they end with it."""
    nodes: list[pods_node.Node] = []

    def make(cards: str = "1x2", **settings: str) -> pods_node.Node:
        nodes.append(pods_node.Node(runtime, cards, whole_cluster, **settings))
        nodes[-1].up()
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
    whole_cluster.clear()
