"""`make fleet`: hundreds of plugins against one real API server, scheduler and claim controller.

Each node is a plugin as a process (mode `dra`, simulated cards, its own token and rights), and a
double of kubelet that registers it and calls it (`fleet_node`). Pods come by template, are bound by
the real scheduler, live for a moment and end. What the plugins asked the API server is counted from
its audit log, by who asked; what others ask there (kubelets, scheduler, controllers) is not theirs.

It fails when something is lost: a device with two claims, a region that is not as asked while a pod
has it or not blank when nobody has, a claim or a pod that does not end, slices that are incomplete.
The figures themselves are no tests.
"""
# ruff: noqa: T201 - a command prints

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Hundreds of processes are made beside grpc's threads, by vfork, which these handlers are not for.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
sys.path += [str(Path(__file__).parents[1] / name) for name in ("integration", "")]

import msgspec
from cluster import ROOT, Cluster, build
from daemon_support import AFU, AFU_2, ID
from fleet_node import DRIVER, LIMIT, FleetNode

from fpga_plugin.kubernetes.apiserver.mirror import Metadata, Mirror
from fpga_plugin.kubernetes.apiserver.rest import Session, session

API = "/apis/resource.k8s.io/v1"
PODS = "/api/v1/namespaces/default/pods"
CLAIMS = f"{API}/namespaces/default/resourceclaims"
USER = "system:serviceaccount:fpga-plugin:fpga-plugin"
MEMORY = 16 << 10
"""MiB that all of it may take together."""

MINUTES = 60.0
"""After them no pod begins, if nothing else is said."""

INOTIFY = 3
"""Instances of one plugin."""

POOL = "pool"
"""The label that says which pool of nodes a node is of."""

INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
"""How many a user may have, and root may write."""

KINDS = (("region-a", 0.45), ("region-b", 0.4), ("card-a", 0.15))
AFUS = {"region-a": AFU, "region-b": AFU_2, "card-a": AFU}


class _Spec(msgspec.Struct):
    nodeName: str = ""  # noqa: N815  # the API's own name


class _ClaimOf(msgspec.Struct):
    resourceClaimName: str = ""  # noqa: N815  # the API's own name


class _PodStatus(msgspec.Struct):
    resourceClaimStatuses: list[_ClaimOf] | None = None  # noqa: N815  # the API's own name


class Pod(msgspec.Struct):
    """What is read of a pod."""

    metadata: Metadata
    spec: _Spec
    status: _PodStatus


class Claim(msgspec.Struct):
    """What is read of a claim."""

    metadata: Metadata
    status: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass
class Fleet:
    """What runs, and what it came to."""

    cluster: Cluster
    nodes: dict[str, FleetNode]
    server: Session
    pods: Mirror[Pod]
    claims: Mirror[Claim]
    begun: int = 0
    ended: int = 0
    bound_seconds: list[float] = field(default_factory=list)


async def until(look: Callable[[], Any], what: str) -> Any:
    """Wait for what nobody announces; what it came to."""
    deadline = time.monotonic() + LIMIT
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {what}"
        await asyncio.sleep(0.2)
    return found


async def life(fleet: Fleet, name: str, kind: str, dwell: float, *, pool: str) -> None:
    """A pod of a pool of nodes, from its creation to the end of its claim."""
    began = time.monotonic()
    await fleet.server.call(
        "POST",
        PODS,
        body={
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": {POOL: pool},
                "resourceClaims": [{"name": "it", "resourceClaimTemplateName": kind}],
                "containers": [
                    {"name": "main", "image": "none", "resources": {"claims": [{"name": "it"}]}}
                ],
            },
        },
    )

    def bound() -> tuple[Pod, Claim] | None:
        pod = fleet.pods.items.get(name)
        if pod is None or not pod.spec.nodeName or not pod.status.resourceClaimStatuses:
            return None
        claim = fleet.claims.items.get(pod.status.resourceClaimStatuses[0].resourceClaimName)
        return None if claim is None or not claim.status.get("allocation") else (pod, claim)

    pod, claim = await until(bound, f"pod {name} is bound")
    fleet.bound_seconds.append(time.monotonic() - began)
    node = fleet.nodes[pod.spec.nodeName]
    told = {
        "namespace": "default",
        "name": claim.metadata.name,
        "uid": claim.metadata.uid,
        "results": claim.status["allocation"]["devices"]["results"],
    }
    await node.prepare(told, pod.metadata.uid, AFUS[kind])
    await asyncio.sleep(dwell)
    await node.unprepare(told, AFUS[kind])
    await fleet.server.call("DELETE", f"{PODS}/{name}", body={"gracePeriodSeconds": 0})
    await until(
        lambda: name not in fleet.pods.items and claim.metadata.name not in fleet.claims.items,
        f"pod {name} and its claim are gone",
    )
    fleet.ended += 1


# -------------------------------------------------------------------- the cluster


def prepared(cluster: Cluster) -> None:
    """Classes, rights and templates."""
    deploy = ROOT / "deploy/dra"
    for name in ("deviceclasses", "rbac", "validating-admission-policy"):
        cluster.apply(deploy / f"{name}.yaml")
    for name, afu in AFUS.items():
        request = {
            "name": "fpga",
            "exactly": {"deviceClassName": f"fpga-{name[:-2]}-{ID[:8]}"},
        }
        parameters = {
            "apiVersion": "fpga.intel.com/v1alpha1",
            "kind": "RegionConfig",
            "bitstream": afu,
        }
        config = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
        devices = {"requests": [request], "config": config}
        cluster.call(
            "POST",
            f"{API}/namespaces/default/resourceclaimtemplates",
            {"metadata": {"name": name}, "spec": {"spec": {"devices": devices}}},
        )


def audit_rules(folder: Path) -> list[str]:
    """The API server's arguments, so that it writes down each request of a plugin."""
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "users": [USER]}],
    }
    (folder / "audit.json").write_text(json.dumps(policy))
    return [f"--audit-policy-file={folder}/audit.json", f"--audit-log-path={folder}/audit.log"]


def asked(log: Path) -> Iterator[tuple[str, str, str]]:
    """What each request of a plugin was (verb, resource) and how it ended; once a request."""
    seen = set()
    for line in log.read_text().splitlines() if log.exists() else ():
        one = json.loads(line)
        if one["auditID"] not in seen:
            seen.add(one["auditID"])
            resource = one.get("objectRef", {}).get("resource", one["requestURI"])
            path = urllib.parse.urlsplit(one["requestURI"])
            verb = "watch" if "watch=true" in path.query else one["verb"]
            yield verb, resource, str(one["responseStatus"]["code"])


def complete(cluster: Cluster, nodes: int) -> dict[str, tuple[int, list[str]]]:
    """Of each node the bytes of its slices as JSON, and its devices; empty while a slice lacks."""
    sizes: dict[str, int] = {}
    devices: dict[str, list[str]] = collections.defaultdict(list)
    pools: dict[str, list[Any]] = collections.defaultdict(list)
    for one in cluster.slices():
        pools[one["spec"]["nodeName"]].append(one["spec"]["pool"])
        one["metadata"].pop("managedFields", None)
        devices[one["spec"]["nodeName"]] += [
            json.dumps(device, sort_keys=True) for device in one["spec"].get("devices", ())
        ]
        size = len(json.dumps(one, separators=(",", ":")))
        sizes[one["spec"]["nodeName"]] = sizes.get(one["spec"]["nodeName"], 0) + size
    whole = all(
        one == many[0] and one["resourceSliceCount"] == len(many)
        for many in pools.values()
        for one in many
    )
    if not whole or len(sizes) != nodes:
        return {}
    return {node: (size, sorted(devices[node])) for node, size in sizes.items()}


# -------------------------------------------------------------------- the run


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it; the figures."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(16))
    cluster = Cluster(folder, api_arguments=audit_rules(folder))
    nodes: dict[str, FleetNode] = {}
    try:
        await asyncio.to_thread(prepared, cluster)
        began = time.monotonic()
        await _start(cluster, folder, arguments, nodes)
        say = f"{len(nodes)} nodes in {time.monotonic() - began:.0f} s"
        sizes = await asyncio.to_thread(
            lambda: _until(lambda: complete(cluster, len(nodes)), "slices")
        )
        await asyncio.sleep(arguments.quiet)  # what a start asks for is asked by then
        print(say, file=sys.stderr, flush=True)
        at_start = collections.Counter(asked(folder / "audit.log"))
        idle = [node.memory() for node in nodes.values()]
        async with session(cluster.kubeconfig(), seconds=60.0) as server:
            fleet = await _pods(cluster, nodes, server, arguments)
        await asyncio.sleep(arguments.quiet)
        at_end = collections.Counter(asked(folder / "audit.log"))
        after = [node.memory() for node in nodes.values()]
        for node in nodes.values():
            node.check_blank()
        lost = [one for node in nodes.values() for one in (*node.wrong, *node.errors())]
        now = await asyncio.to_thread(lambda: complete(cluster, len(nodes)))
        if {node: devices for node, (_, devices) in now.items()} != {
            node: devices for node, (_, devices) in sizes.items()
        }:
            lost.append("the slices are not what they were")
        if left := [one["metadata"]["name"] for one in await asyncio.to_thread(cluster.claims)]:
            lost.append(f"{len(left)} claims are left: {left[:3]}")
        control = cluster.memory()
    finally:
        await asyncio.gather(*(node.stop() for node in nodes.values()))
        cluster.end()
    took = {
        method: sorted(itertools.chain(*(node.seconds[method] for node in nodes.values())))
        for method in ("Prepare", "Unprepare")
    }
    return {
        "nodes": len(nodes),
        "pods": fleet.ended,
        "begun": fleet.begun,
        "asked": arguments.pods,
        "hardware": arguments.hardware,
        "pools": arguments.pools,
        "lost": lost,
        "refused": [one for node in nodes.values() for one in node.refused],
        "start": _per(at_start, len(nodes)),
        "life": _per(at_end - at_start, max(fleet.ended, 1)),
        "answers": dict(
            sorted(collections.Counter(code for *_, code in at_end.elements()).items())
        ),
        "slice_bytes": statistics.mean(size for size, _ in sizes.values()),
        "idle_mib": [statistics.mean(one) for one in zip(*idle, strict=True)],
        "after_mib": [statistics.mean(one) for one in zip(*after, strict=True)],
        "all_mib": sum(pss for _, pss in after) + sum(control.values()),
        "control_mib": control,
        "bound": _spread(sorted(fleet.bound_seconds)),
        "prepare": _spread(took["Prepare"]),
        "unprepare": _spread(took["Unprepare"]),
    }


async def _start(
    cluster: Cluster, folder: Path, arguments: argparse.Namespace, nodes: dict[str, FleetNode]
) -> None:
    """Nodes and plugins, a few at a time."""
    turn = asyncio.Semaphore(arguments.step)

    async def one(number: int) -> None:
        name = f"node-{number}"
        async with turn:
            await asyncio.to_thread(cluster.add_node, name, **{POOL: str(number % arguments.pools)})
            token = await asyncio.to_thread(cluster.plugin_token, name)
            here = folder / f"n{number}"
            here.mkdir()
            node = FleetNode(
                here,
                name,
                cluster.kubeconfig(token, name=name),
                arguments.hardware,
                python=arguments.python,
                user=arguments.users and arguments.users + number,
            )
            nodes[name] = node
            await node.start()

    async with asyncio.TaskGroup() as group:
        for number in range(arguments.nodes):
            group.create_task(one(number))


async def _pods(
    cluster: Cluster, nodes: dict[str, FleetNode], server: Session, arguments: argparse.Namespace
) -> Fleet:
    """All pods through the nodes."""
    admin = cluster.kubeconfig()
    pods = Mirror(admin, PODS, Pod, fields={}, changed=lambda: None)
    claims = Mirror(admin, CLAIMS, Claim, fields={}, changed=lambda: None)
    following = [asyncio.create_task(one.run()) for one in (pods, claims)]
    fleet = Fleet(cluster, nodes, server, pods, claims)
    turn = asyncio.Semaphore(arguments.alive or max(10, len(nodes) // 2))
    minutes = MINUTES if arguments.minutes is None else arguments.minutes
    until = time.monotonic() + 60 * minutes
    rng = random.Random(arguments.seed)
    kinds, weights = zip(*KINDS, strict=True)

    async def one(number: int, kind: str, dwell: float) -> None:
        async with turn:
            if time.monotonic() > until:
                return
            fleet.begun += 1
            pool = str(number % arguments.pools)
            await life(fleet, f"pod-{number}", kind, dwell, pool=pool)
            if fleet.ended % 100 == 0:
                print(f"{fleet.ended} pods", file=sys.stderr, flush=True)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(arguments.pods):
                (kind,) = rng.choices(kinds, weights)
                group.create_task(one(number, kind, rng.uniform(0.0, 2.0)))
    finally:
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
    return fleet


def _until(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {what}"
        time.sleep(1.0)
    return found


def _per(counts: collections.Counter[tuple[str, str, str]], number: int) -> dict[str, float]:
    """Requests of each kind for one of so many."""
    found: collections.Counter[str] = collections.Counter()
    for (verb, resource, _), count in counts.items():
        found[f"{verb} {resource}"] += count
    return {kind: count / number for kind, count in sorted(found.items())}


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    at = {"p50": len(values) // 2, "p99": len(values) * 99 // 100, "max": len(values) - 1}
    return {name: values[index] for name, index in at.items()}


# -------------------------------------------------------------------- what it came to


def report(found: dict[str, Any], *, of: int = 5000, rate: float = 10.0) -> str:
    """The table, and what so many nodes with so many pods a second would ask for."""
    start, each = sum(found["start"].values()), sum(found["life"].values())
    pods = f"{found['pods']} of the {found['asked']} that were asked for"
    watches = of / 570  # a watch is asked for again after api.mirror.WATCH_SECONDS
    rows = [
        ("plugins, pools", f"{found['nodes']} ({found['hardware']}), {found['pools']}"),
        ("pods", pods),
        ("lost", str(len(found["lost"]))),
        ("calls that were refused and tried again", str(len(found["refused"]))),
        ("answers of the API server, by code", _listed(found["answers"], "{:.0f}")),
        ("requests a node start", f"{start:.2f}: {_listed(found['start'])}"),
        ("requests a pod life", f"{each:.2f}: {_listed(found['life'])}"),
        ("bytes of a node's slices, JSON", f"{found['slice_bytes']:.0f}"),
        ("a plugin, idle: RSS, PSS", "{:.1f}, {:.1f} MiB".format(*found["idle_mib"])),
        ("a plugin, afterwards: RSS, PSS", "{:.1f}, {:.1f} MiB".format(*found["after_mib"])),
        ("API server, scheduler, controllers, etcd", _listed(found["control_mib"], "{:.0f} MiB")),
        ("all of it (PSS)", f"{found['all_mib'] / 1024:.1f} GiB of {MEMORY >> 10}"),
        ("pod made until bound", _listed(found["bound"], "{:.2f} s")),
        ("Prepare, the PR of 0.05 s included", _listed(found["prepare"], "{:.2f} s")),
        ("Unprepare, the same", _listed(found["unprepare"], "{:.2f} s")),
        (
            f"{of} nodes, by calculation",
            (
                f"{of * start:.0f} requests when all start; {of} open watches, renewed"
                f" {watches:.1f} times a second; {rate * each:.0f} requests/s at {rate:g} pods/s;"
                f" {of * found['slice_bytes'] / (1 << 20):.1f} MiB of slices"
            ),
        ),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {text}" for name, text in rows]
    return "\n".join([*lines, *(f"LOST: {one}" for one in found["lost"][:20])])


def _listed(values: dict[str, float], form: str = "{:.2f}") -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())


def failed(found: dict[str, Any], *, may_be_cut_short: bool) -> bool:
    """Whether something was lost or too much was taken, or the run says less than was asked."""
    enough = found["begun"] == found["asked"] or may_be_cut_short
    whole = found["pods"] == found["begun"] and enough
    return bool(found["lost"]) or not whole or found["all_mib"] > MEMORY


@contextlib.contextmanager
def enough_instances(arguments: argparse.Namespace) -> Iterator[None]:
    """Let a user have as many inotify instances as the plugins take, while they run.

    Root raises the kernel's limit, says so, and puts it back, whatever ends the run (but SIGKILL).
    """
    limit = int(INSTANCES.read_text())
    needed = arguments.nodes * INOTIFY * 4 // 3
    if arguments.users or needed <= limit:
        yield
        return
    why = (
        f"{arguments.nodes} plugins take {arguments.nodes * INOTIFY} inotify instances, and a user"
        f" has {limit} (fs.inotify.max_user_instances)"
    )
    if os.geteuid() != 0:
        sys.exit(f"fleet: {why}: run it as root, which raises it for the time of the run")
    print(f"fleet: {why}: it is {needed} until the end of the run", file=sys.stderr, flush=True)
    INSTANCES.write_text(str(needed))
    try:
        yield
    finally:
        INSTANCES.write_text(str(limit))
        print(f"fleet: fs.inotify.max_user_instances is {limit} again", file=sys.stderr, flush=True)


def main() -> int:
    """Run, print, return the exit code."""
    parser = argparse.ArgumentParser(prog="make fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--hardware", default="2x2", help="simulated cards of a node")
    # The scheduler takes one after the other: with more of them each only waits for longer.
    parser.add_argument(
        "--alive", type=int, default=0, help="pods at a time (half as many as nodes)"
    )
    # The scheduler looks at the devices of each node that a pod may have.
    parser.add_argument(
        "--pools", type=int, default=20, help="node pools, one of which a pod selects"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"begin no pod after that ({MINUTES:g}: then it fails if pods are left)",
    )
    parser.add_argument("--step", type=int, default=4, help="plugins that start at a time")
    parser.add_argument("--quiet", type=float, default=15.0, help="seconds until all is at rest")
    parser.add_argument(
        "--users",
        type=int,
        default=0,
        metavar="UID",
        help="as root: plugins run as UID, UID + 1, …",
    )
    parser.add_argument("--python", default=sys.executable, help="that these users may run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    arguments.pools = max(1, min(arguments.pools, arguments.nodes))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was raised is put back
    build()
    folder = Path(tempfile.mkdtemp(prefix="fleet-"))  # short: the path of a socket has 107 bytes
    folder.chmod(0o755)
    try:
        with enough_instances(arguments):
            found = asyncio.run(run(arguments, folder))
    except BaseException:
        print(f"fleet: the logs are in {folder}", file=sys.stderr)
        raise
    bad = failed(found, may_be_cut_short=arguments.minutes is not None)
    print(json.dumps(found, indent=2) if arguments.json else report(found))
    if not bad:
        shutil.rmtree(folder)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
