"""Fixtures of the tests with the real kubelet: `make test-kubelet` runs them in namespaces."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "integration"))

import pod_plugin
from control_plane import ControlPlane
from machine import PLUGIN_IN_A_POD, RELEASE, Runtime
from node import Node  # daemon_support is found by the line above


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if "FPGA_KUBELET_SCRATCH" not in os.environ:
        reason = "needs namespaces and a kubelet of its own: make test-kubelet"
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    part = os.environ.get("FPGA_KUBELET_PART", "")
    others = [item for item in ours if part not in item.name]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    runtime = Runtime()
    if PLUGIN_IN_A_POD:
        pod_plugin.load_image(runtime)
    yield runtime
    runtime.process.end()


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    control_plane = ControlPlane()
    yield control_plane
    control_plane.end()


PODS_API = RELEASE >= (1, 36)
"""Whether this kubelet has the Pods API at all."""


@pytest.fixture(params=["pods-api", "api-server"])
def make_node(runtime: Runtime, request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    """Nodes of a test, one after the other; they end with it.

    Each test runs twice: with a kubelet by itself, whose Pods API reports what a pod asks for, and
    with an API server that reports it.
    """
    nodes: list[Node] = []
    control_plane: ControlPlane | None = None
    if request.param == "api-server":
        control_plane = request.getfixturevalue("control_plane")
    elif not PODS_API:
        pytest.skip("this kubelet has no Pods API")

    def make(
        cards: str = "1x2", *, pods_api: bool = control_plane is None, **settings: Any
    ) -> Node:
        gates = {"PodsAPI": pods_api} if PODS_API else {}
        nodes.append(Node(runtime, cards, gates, control_plane, **settings))
        return nodes[-1].up()

    yield make
    for node in nodes:
        node.close()
    if control_plane is not None:
        control_plane.clear()
