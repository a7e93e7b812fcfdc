"""Slices on a real API server, with the real scheduler and controllers."""

import asyncio
import contextlib
import random
import threading
import urllib.error
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import LIMIT, Cluster, until
from doubles.cards import REGIONS, device, make_card
from doubles.loops import beside
from doubles.loops import until as soon
from ledger_support import make_ledger, scrub

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.dra.desired import Form, desired_slices
from fpga_plugin.dra.names import device_name
from fpga_plugin.dra.pool import MAX_NAME, Pool
from fpga_plugin.dra.poolcheck import PoolCheck
from fpga_plugin.dra.slices import SliceReconciler
from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.settings.settings import Advertise

DEPLOY = Path(__file__).parents[2] / "deploy/dra"
DRIVER = "fpga.intel.com"
API = "/apis/resource.k8s.io/v1"
SLICES = f"{API}/resourceslices"
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
    token: str

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
def node(cluster: Cluster, cards=CARDS, *, as_plugin: bool = False) -> Iterator[Node]:
    name = f"node-{uuid.uuid4().hex[:8]}"
    cluster.add_node(name)
    token = cluster.plugin_token(name) if as_plugin else "admin"
    credentials = cluster.kubeconfig(token, name=name)
    ledger, _ = make_ledger(*cards)
    made: list[Node] = []
    ready, ended = threading.Event(), []

    async def main() -> None:
        registered = asyncio.Event()
        registered.set()
        reconciler = SliceReconciler(
            credentials,
            Pool(DRIVER, name),
            partial(desired_slices, ledger, driver=DRIVER, advertise=Advertise.BOTH),
            registered=registered,
            settle=0.1,
        )
        ledger.subscribe(lambda _: reconciler.wake())
        made.append(Node(cluster, name, ledger, reconciler, asyncio.get_running_loop(), token))
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


def asking(kind: str, node: Node) -> dict[str, Any]:
    """The spec of a pod that asks for a device by template."""
    return {
        "nodeSelector": {"kubernetes.io/hostname": node.name},
        "resourceClaims": [{"name": "it", "resourceClaimTemplateName": f"a-{kind}"}],
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
        here.do(lambda: here.ledger.hardware.set_failing(card.id, {region: hot}))
        name = device_name(device(card, 0))
        (taint,) = until(lambda: here.devices()[name].get("taints"), "a taint")
        assert (taint["key"], taint["value"]) == (f"{DRIVER}/faulted", "thermal")
        classes.add_pod("held-back", **asking("region", here))
        here.do(lambda: here.ledger.hardware.set_drained(card.id, drained=True))
        both = until(lambda: len(t := here.devices()[name]["taints"]) == 2 and t, "two taints")
        assert taint in both
        assert not bound(classes, "held-back")
        here.do(lambda: here.ledger.hardware.set_failing(card.id, {}))
        here.do(lambda: here.ledger.hardware.set_drained(card.id, drained=False))
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


def test_the_documented_ways_to_ask_each_get_a_device(classes: Cluster) -> None:
    with node(classes) as here:
        names = [
            one["metadata"]["name"]
            for one in classes.apply(DEPLOY / "claims.yaml")
            if one["kind"] == "Pod"
        ]
        assert len(names) == 5
        until(lambda: all(bound(classes, name) for name in names), "all pods are bound")
        given = [found for results in allocated(classes).values() for _, found in results]
        whole = {device_name(device(card)) for card in CARDS}
        assert len(given) == 5
        assert sum(one in whole for one in given) == 2, "by claim, and the first of the list"
        for name in names:
            classes.delete_pod(name)
        until(lambda: not allocated(classes), "all claims are free")
        assert here.complete()


def denied(cluster: Cluster, method: str, path: str, body: Any, token: str) -> str:
    """Why the server refuses; empty: it does not. Nothing is written."""
    try:
        cluster.call(method, f"{path}?dryRun=All", body, token=token)
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    return ""


@pytest.fixture(scope="session")
def policed(cluster: Cluster) -> Cluster:
    """The cluster, with the plugin's rights and the policy that narrows them."""
    cluster.apply(DEPLOY / "rbac.yaml")
    cluster.apply(DEPLOY / "validating-admission-policy.yaml")
    token = cluster.plugin_token("nowhere")
    body = a_slice("z", node="elsewhere")
    # A new policy takes the server a moment.
    until(lambda: "own node only" in denied(cluster, "POST", SLICES, body, token), "it is in force")
    return cluster


def a_slice(name: str, *, node: str, pool: str = "", generation: int = 1) -> dict[str, Any]:
    """An empty one."""
    told = {"name": pool or node, "generation": generation, "resourceSliceCount": 1}
    return {
        "metadata": {"name": name},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": told, "devices": []},
    }


def test_a_plugin_with_its_own_rights_writes_its_own_nodes_slices_and_no_others(
    policed: Cluster,
) -> None:
    with node(policed, as_plugin=True) as here, node(policed) as other:
        before = here.devices()
        policed.call("DELETE", f"{SLICES}/{here.slices()[0]['metadata']['name']}")
        until(lambda: here.complete() and here.devices() == before, "its own come back")
        token = here.token
        theirs, mine = other.slices()[0], here.slices()[0]
        one, own = (f"{SLICES}/{each['metadata']['name']}" for each in (theirs, mine))
        forged = {"metadata": {"name": "forged"}, "spec": theirs["spec"]}
        alien = {"metadata": {"name": "alien"}, "spec": mine["spec"] | {"driver": "other.example"}}
        assert "own node only" in denied(policed, "POST", SLICES, forged, token)
        assert "own node only" in denied(policed, "PUT", one, theirs, token)
        assert "own node only" in denied(policed, "DELETE", one, None, token)
        assert "driver fpga.intel.com only" in denied(policed, "POST", SLICES, alien, token)
        unbound = policed.call(
            "POST", "/api/v1/namespaces/fpga-plugin/serviceaccounts/fpga-plugin/token", {"spec": {}}
        )["status"]["token"]
        assert "names no node" in denied(policed, "PUT", own, mine, unbound)
        assert here.devices() == before


def test_a_plugin_takes_neither_pool_nor_name_of_another_node(policed: Cluster) -> None:
    token = policed.plugin_token("node-a")

    def refusal(name: str, *, pool: str = "node-a") -> str:
        body = a_slice(name, node="node-a", pool=pool, generation=1 << 61)
        return denied(policed, "POST", SLICES, body, token)

    mine, theirs = Pool(DRIVER, "node-a").name("d", 0), Pool(DRIVER, "node-b").name("d", 0)
    assert refusal(mine) == ""
    assert "the pool of its own node only" in refusal(mine, pool="node-b")
    for name in (theirs, "z", f"x0000-{DRIVER}-node-a", f"d0000-{DRIVER}-node-a-2", "d0000-node-a"):
        assert "the names of its own node only" in refusal(name), name


def test_what_is_left_in_another_nodes_pool_may_be_deleted_by_its_own_node(
    policed: Cluster,
) -> None:
    policed.call("POST", SLICES, a_slice("left", node="node-c", pool="node-d"))
    try:
        path = f"{SLICES}/left"
        assert denied(policed, "DELETE", path, None, policed.plugin_token("node-c")) == ""
        assert "own node only" in denied(
            policed, "DELETE", path, None, policed.plugin_token("node-d")
        )
    finally:
        policed.call("DELETE", f"{SLICES}/left")


@pytest.mark.parametrize("length", [232, 233, 253])
@pytest.mark.parametrize("label", ["a", "a."])
def test_long_names_of_nodes_are_theirs_as_well(policed: Cluster, length: int, label: str) -> None:
    """From 233 characters on a slice's name ends in a hash, and what it cuts may end in a dot."""
    name = ("a" + label * length)[: length - 1] + "b"
    token = policed.plugin_token(name)
    mine = Pool(DRIVER, name).name("c", 3)
    assert len(mine) <= MAX_NAME
    assert denied(policed, "POST", SLICES, a_slice(mine, node=name), token) == ""
    other = Pool(DRIVER, "c" + name[1:]).name("c", 3)
    short = f"c0003-{DRIVER}-{name[:30].rstrip('.')}-0123456789abcdef"
    for taken in (other, short):
        body = a_slice(taken, node=name)
        assert "the names of its own node only" in denied(policed, "POST", SLICES, body, token)


def test_a_foreign_slice_in_the_pool_is_reported_until_it_goes(cluster: Cluster) -> None:
    credentials = cluster.kubeconfig("admin", name="pool-check")
    warned: list[str] = []

    async def main() -> None:
        check = PoolCheck(
            credentials, Pool(DRIVER, "node-b"), warn=warned.append, pause=lambda: 0.1
        )

        async def call(method: str, path: str, body: Any = None) -> None:
            await asyncio.to_thread(cluster.call, method, path, body)

        await call("POST", SLICES, a_slice("own", node="node-b"))
        await call("POST", SLICES, a_slice("evil", node="node-a", pool="node-b"))
        async with beside(check.run()):
            await soon(lambda: check.foreign == ("evil",))
            assert "'evil' of node 'node-a'" in check.problem
            await call("DELETE", f"{SLICES}/evil")
            await soon(lambda: check.foreign == ())
        await call("DELETE", f"{SLICES}/own")

    asyncio.run(main())
    assert len(warned) == 1


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
