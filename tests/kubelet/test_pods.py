"""Pods of several containers, init containers, sidecars and resources: to each its own bitstreams.

Which container holds which device is read from kubelet's checkpoint, which has init containers too;
what was programmed, from the plugin's log: one line for each start of a container.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    OTHER_BLANK,
    OTHER_CARDS,
    OTHER_ID,
    OTHER_REGIONS,
    P0,
    P1,
    REGIONS,
    request,
)
from machine import STAY
from node import Node, container


@dataclass(frozen=True)
class Row:
    """A container of the table.

    Attributes:
        name: of the container.
        asks: its requests, as its environment has them.
        gets: for each resource what its regions hold once it starts, in the order of the regions.
        kind: `init`, `side` or `app`.
    """

    name: str
    asks: dict[str, str]
    gets: dict[str, Sequence[str]] = field(default_factory=dict)
    kind: str = "app"

    def manifest(self) -> dict:
        """As the pod has it; a whole card of the table has two regions."""
        counts = {name: 1 if name == CARDS else len(afus) for name, afus in self.gets.items()}
        more = {"restartPolicy": "Always"} if self.kind == "side" else {}
        command = "exit 0" if self.kind == "init" else STAY
        return container(self.name, env=self.asks, resources=counts, command=command, **more)


def one(name: str, afu: str = "", kind: str = "app") -> Row:
    """A container with one region."""
    return Row(name, request(afu) if afu else {}, {REGIONS: [afu or BLANK]}, kind)


OTHER = request(AFU_3, interface=OTHER_ID, n="other")

TABLE: dict[str, list[Row]] = {
    "one": [one("app", AFU)],
    "none asked for": [one("app")],
    "no device": [one("app", AFU), Row("helper", request(AFU_2))],
    "two apps": [one("app", AFU), one("second", AFU_2)],
    "two alike": [one("app", AFU), one("second", AFU)],
    "one after the other": [
        one("first", AFU_2, "init"),
        one("second", AFU_3, "init"),
        one("app", AFU),
    ],
    "init alike": [one("first", AFU, "init"), one("app", AFU)],
    "init without a request": [one("first", "", "init"), one("app", AFU)],
    "init alone has a device": [one("first", AFU, "init"), Row("app", {})],
    "a sidecar takes the init container's": [
        one("first", AFU_2, "init"),
        one("side", AFU_3, "side"),
        one("app", AFU),
    ],
    "a sidecar, then an init container": [
        one("side", AFU_3, "side"),
        one("first", AFU_2, "init"),
        one("app", AFU),
    ],
    "two regions, two requests": [
        Row("app", request(AFU, n="1") | request(AFU_2, n="2"), {REGIONS: [AFU, AFU_2]})
    ],
    "two regions, one request": [Row("app", request(AFU_2), {REGIONS: [AFU_2, BLANK]})],
    "two resources": [
        Row("app", request(AFU) | OTHER, {REGIONS: [AFU], OTHER_REGIONS: [AFU_3]}),
    ],
    "two resources, after an init container of one": [
        one("first", AFU_2, "init"),
        Row("app", request(AFU) | OTHER, {REGIONS: [AFU], OTHER_REGIONS: [AFU_3]}),
    ],
    "a container a resource": [
        one("app", AFU),
        Row("second", OTHER, {OTHER_REGIONS: [AFU_3]}),
    ],
    "a whole card": [Row("app", request(AFU_2), {CARDS: [AFU_2, BLANK]})],
    "a whole card, after an init container": [
        Row("first", request(AFU), {CARDS: [AFU, BLANK]}, "init"),
        Row("app", request(AFU_2) | request(AFU_3, n="2"), {CARDS: [AFU_2, AFU_3]}),
    ],
}

STARTS = ("init", "side", "app")


def only_podresources_tells(row_name: str) -> bool:
    """PodResources never shows plain init containers, so the API server cannot be asked."""
    return row_name == "init alone has a device"


def test_each_container_gets_exactly_its_own_bitstreams(make_node: Callable[..., Node]) -> None:
    """All the table's pods, one after the other on one node."""
    node = make_node(f"1x2,1x1@{OTHER_ID}")
    for name, rows in TABLE.items():
        if only_podresources_tells(name) and node.kubelet.control_plane is not None:
            continue
        check(node, name, rows)


def check(node: Node, name: str, rows: list[Row]) -> None:
    before = [row.manifest() for row in rows if row.kind != "app"]
    apps = [row for row in rows if row.kind == "app"]
    pod = node.pod(
        name.replace(" ", "-").replace(",", "").replace("'", ""),
        *(row.manifest() for row in apps),
        **({"initContainers": before} if before else {}),
    )
    for row in rows:
        if row.kind != "init":
            pod.until_running(row.name)
    wanted: dict[str, list[str]] = {}
    for row in rows:
        for resource, afus in row.gets.items():
            (held,) = [
                [device for ids in entry["DeviceIDs"].values() for device in ids]
                for entry in node.checkpoint()
                if (entry["PodUID"], entry["ContainerName"], entry["ResourceName"])
                == (pod.uid, row.name, resource)
            ]
            regions = sorted(
                region
                for region in node.regions()
                if region in held or region.rpartition("-p")[0] in held
            )
            for region, afu in zip(regions, afus, strict=True):
                wanted.setdefault(region, []).append(afu)
    programmed: dict[str, list[str]] = {}
    for line in node.plugin.logged("prepared", pod=pod.uid, error=None):
        for region, bitstream in line["bitstreams"].items():
            programmed.setdefault(region, []).append(bitstream or BLANK)
    assert programmed == wanted, name
    for region, state in node.regions().items():
        assert region in wanted or state["afu_id"] in {BLANK, OTHER_BLANK}, (name, region)
        assert region not in wanted or state["afu_id"] == wanted[region][-1], (name, region)
    pod.delete()
    pod.until_gone()
    # Both lists: what is owned stays on one of them.
    node.until_offered(CARDS, [CARD])
    node.until_offered(REGIONS, [P0, P1])
    node.until_offered(OTHER_CARDS, [CARD_2])
