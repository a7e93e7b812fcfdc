"""Fixtures of the tests with the real kubelet: `make test-kubelet` runs them in namespaces."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from node import Node, Runtime  # daemon_support is found by the line above


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "FPGA_KUBELET_SCRATCH" not in os.environ:
        reason = "needs namespaces and a kubelet of its own: make test-kubelet"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    runtime = Runtime()
    yield runtime
    runtime.process.end()


@pytest.fixture
def make_node(runtime: Runtime) -> Iterator[Callable[..., Node]]:
    """Nodes of a test, one after the other; they end with it."""
    nodes: list[Node] = []

    def make(cards: str = "1x2", *, pods_api: bool = True, **settings: Any) -> Node:
        nodes.append(Node(runtime, cards, {"PodsAPI": pods_api}, **settings))
        return nodes[-1].up()

    yield make
    for node in nodes:
        node.close()
