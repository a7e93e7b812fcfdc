"""Slices on a real API server, with the real scheduler and controllers."""

import asyncio
import contextlib
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from cluster import LIMIT, Cluster, until
from doubles.cards import INTERFACE, REGIONS, WHOLE, device, make_card
from ledger_support import make_ledger, scrub

from fpga_plugin.config.settings import Advertise, ScrubPolicy
from fpga_plugin.dra.names import device_name
from fpga_plugin.dra.pool import Pool
from fpga_plugin.dra.slices import SliceReconciler
from fpga_plugin.dra.wanted import Form, Wanted
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.ledger.ledger import Ledger

DRIVER = "fpga.intel.com"
API = "/apis/resource.k8s.io/v1"
NAMESPACED = f"{API}/namespaces/default"
CARDS = tuple(make_card(number, nodes=(2 * number, 2 * number + 1)) for number in range(1, 5))


@dataclass
class Node:
    """A node with cards, and the reconciler of its slices, on a loop of its own."""

    cluster: Cluster
    name: str
    ledger: Ledger
    reconciler: SliceReconciler
    loop: asyncio.AbstractEventLoop

    def do(self, change: Callable[[], Any]) -> None:
        """Change the ledger, on the loop that it belongs to."""
        done = threading.Event()

        def step() -> None:
            change()
            done.set()

        self.loop.call_soon_threadsafe(step)
        assert done.wait(LIMIT)

    def slices(self) -> list[dict[str, Any]]:
        found = [one for one in self.cluster.slices() if one["spec"]["nodeName"] == self.name]
        return sorted(found, key=lambda one: one["metadata"]["name"])

    def devices(self) -> dict[str, dict[str, Any]]:
        return {d["name"]: d for one in self.slices() for d in one["spec"].get("devices", ())}

    def complete(self) -> bool:
        """One generation, with as many slices as each says."""
        pools = [one["spec"]["pool"] for one in self.slices()]
        return bool(pools) and all(
            pool == pools[0] and pool["resourceSliceCount"] == len(pools) for pool in pools
        )


@contextlib.contextmanager
def node(cluster: Cluster, cards=CARDS) -> Iterator[Node]:
    name = f"node-{uuid.uuid4().hex[:8]}"
    cluster.add_node(name)
    ledger, _ = make_ledger(*cards)
    made: list[Node] = []
    ready, ended = threading.Event(), []

    async def main() -> None:
        registered = asyncio.Event()
        registered.set()
        reconciler = SliceReconciler(
            cluster.kubeconfig(),
            Pool(DRIVER, name),
            Wanted(ledger, advertise=Advertise.BOTH, scrub=ScrubPolicy.REQUIRED),
            registered=registered,
            settle=0.1,
        )
        ledger.subscribe(lambda _: reconciler.wake())
        made.append(Node(cluster, name, ledger, reconciler, asyncio.get_running_loop()))
        running = asyncio.create_task(reconciler.run())
        ended.append(running)
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(LIMIT)
    try:
        until(made[0].complete, f"slices of {name}: {made[0].reconciler.problem}")
        yield made[0]
    finally:
        made[0].loop.call_soon_threadsafe(ended[0].cancel)
        thread.join()
        for one in made[0].slices():
            cluster.call("DELETE", f"{API}/resourceslices/{one['metadata']['name']}")
        cluster.call("DELETE", f"/api/v1/nodes/{name}")


@pytest.fixture(scope="session")
def classes(cluster: Cluster) -> Cluster:
    """The cluster, with a class of regions and one of cards, also as extended resources."""
    for kind, resource in (("region", REGIONS), ("card", WHOLE)):
        expression = (
            f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].type == "{kind}"'
            f' && device.attributes["{DRIVER}"].interfaceID == "{INTERFACE}"'
        )
        cluster.call("POST", f"{API}/deviceclasses", {
            "metadata": {"name": f"fpga-{kind}"},
            "spec": {"extendedResourceName": resource,
                     "selectors": [{"cel": {"expression": expression}}]},
        })  # fmt: skip
        request = {"name": "fpga", "exactly": {"deviceClassName": f"fpga-{kind}"}}
        cluster.call("POST", f"{NAMESPACED}/resourceclaimtemplates", {
            "metadata": {"name": f"one-{kind}"},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        })  # fmt: skip
    return cluster


def asking(kind: str, node: Node) -> dict[str, Any]:
    """The spec of a pod that asks for a device by template."""
    return {
        "nodeSelector": {"kubernetes.io/hostname": node.name},
        "resourceClaims": [{"name": "it", "resourceClaimTemplateName": f"one-{kind}"}],
        "containers": [
            {"name": "main", "image": "none", "resources": {"claims": [{"name": "it"}]}}
        ],
    }


def allocated(cluster: Cluster) -> dict[str, list[tuple[str, str]]]:
    """Pool and device of each claim that has any, at one instant."""
    return {
        claim["metadata"]["name"]: [
            (one["pool"], one["device"])
            for one in claim["status"]["allocation"]["devices"]["results"]
        ]
        for claim in cluster.claims()
        if claim.get("status", {}).get("allocation")
    }


def bound(cluster: Cluster, name: str) -> bool:
    pod = cluster.pod(name)
    return pod is not None and bool(pod["spec"].get("nodeName"))


def test_what_is_published_is_what_was_meant(cluster: Cluster) -> None:
    with node(cluster) as here:
        assert here.reconciler.form == Form(), "the server drops nothing"
        versions = [one["metadata"]["resourceVersion"] for one in here.slices()]
        assert len(here.devices()) == 12
        here.do(here.reconciler.wake)
        until(lambda: here.reconciler.published, "published")
        assert [one["metadata"]["resourceVersion"] for one in here.slices()] == versions


def test_an_empty_node_and_many_cards_are_taken_by_the_server(cluster: Cluster) -> None:
    with node(cluster, ()) as here:
        assert here.devices() == {}
    many = [make_card(bus, nodes=range(40 * bus, 40 * bus + 40)) for bus in range(1, 11)]
    with node(cluster, many) as here:
        assert len(here.devices()) == 410
        until(lambda: not here.reconciler.problem, "no problem")


def test_slices_that_are_deleted_come_back_and_go_with_their_node(cluster: Cluster) -> None:
    with node(cluster) as here:
        before = here.devices()
        query = f"fieldSelector=spec.driver%3D{DRIVER},spec.nodeName%3D{here.name}"
        cluster.call("DELETE", f"{API}/resourceslices?{query}")  # as kubelet does when it starts
        until(lambda: here.complete() and here.devices() == before, "all slices again")
        (uid,) = {one["metadata"]["ownerReferences"][0]["uid"] for one in here.slices()}
        assert cluster.call("GET", f"/api/v1/nodes/{here.name}")["metadata"]["uid"] == uid


def test_a_taint_keeps_its_time_and_holds_a_pod_back(classes: Cluster) -> None:
    hot = Fault(FaultKind.TRANSIENT, "thermal: AP6")
    card = make_card(9, nodes=(30,))
    region = card.regions[0].id
    with node(classes, (card,)) as here:
        here.do(lambda: here.ledger.set_failing(card.id, {region: hot}))
        name = device_name(device(card, 0))
        (taint,) = until(lambda: here.devices()[name].get("taints"), "a taint")
        assert (taint["key"], taint["value"]) == (f"{DRIVER}/faulted", "thermal")
        classes.add_pod("held-back", **asking("region", here))
        here.do(lambda: here.ledger.set_drained(card.id, drained=True))
        both = until(lambda: len(t := here.devices()[name]["taints"]) == 2 and t, "two taints")
        assert taint in both
        assert not bound(classes, "held-back")
        here.do(lambda: here.ledger.set_failing(card.id, {}))
        here.do(lambda: here.ledger.set_drained(card.id, drained=False))
        here.do(lambda: scrub(here.ledger, card))  # as after every failure
        until(lambda: bound(classes, "held-back"), "the pod is bound")
        classes.delete_pod("held-back")
        until(lambda: not allocated(classes), "the claim is free")


def test_a_pod_by_limits_gets_a_region(classes: Cluster) -> None:
    with node(classes) as here:
        classes.add_pod(
            "by-limits",
            nodeSelector={"kubernetes.io/hostname": here.name},
            containers=[{"name": "main", "image": "none", "resources": {"limits": {REGIONS: "1"}}}],
        )
        until(lambda: bound(classes, "by-limits"), "the pod is bound")
        ((pool, found),) = next(iter(allocated(classes).values()))
        assert (pool, found) == (here.name, device_name(device(CARDS[0], 0)))
        classes.delete_pod("by-limits")
        until(lambda: not allocated(classes), "the claim is free")


def test_a_card_and_its_regions_are_never_given_out_together(classes: Cluster) -> None:
    """500 pods that ask for a card or a region at random, and end at random."""
    rng = random.Random(7)
    of_card = {
        device_name(device(card)): {device_name(device(card, port)) for port in (0, 1)}
        for card in CARDS
    }
    seen: set[str] = set()

    def check() -> int:
        now = [found for results in allocated(classes).values() for found in results]
        assert len(set(now)) == len(now), f"given out twice: {sorted(now)}"
        names = {name for _, name in now}
        for card, regions in of_card.items():
            assert not (card in names and regions & names), sorted(names)
        seen.update(names)
        return len(now)

    with node(classes) as here:
        living: list[str] = []
        for number in range(500):
            name = f"random-{number}"
            kind = rng.choice(("region", "region", "card"))
            classes.add_pod(name, **asking(kind, here))
            living.append(name)
            # More than there is room for, so that something always waits.
            while len(living) > 24:
                classes.delete_pod(living.pop(rng.randrange(len(living))))
            if number % 5 == 0:
                check()
            if number % 25 == 0:
                until(lambda: check() > 0, "something is given out")
        while living:
            classes.delete_pod(living.pop(rng.randrange(len(living))))
            check()
        until(lambda: check() == 0, "nothing is given out")
        assert seen & of_card.keys(), "no card was given out"
        assert seen - of_card.keys(), "no region was given out"
