"""The daemon on a card under umockdev: an allocation over real device nodes, ioctls, uevents."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_support import (
    AFU,
    AFU_2,
    BLANK,
    HEALTHY,
    UNHEALTHY,
    Node,
    Refused,
    request,
)
from daemon_support import CARDS as WHOLE
from daemon_support import REGIONS as REGION
from test_umockdev import BASE, CARD, OTHER, OTHER_ADDRESS, PCI, Process, card

pytestmark = pytest.mark.needs("umockdev")

P0, P1 = f"{CARD}-p0", f"{CARD}-p1"


@pytest.fixture
def host() -> Iterator[Process]:
    process = Process("/usr/bin/python3", str(Path(__file__).parent / "umockdev_host.py"))
    for driver in ("dfl-fme", "dfl-port"):
        (Path(process("root")) / "sys/bus/platform/drivers" / driver).mkdir(parents=True)
    process("add", devices=card(ports=2))
    process("follow", ports=[f"/sys{BASE}/dfl-port.{port}" for port in range(2)])
    for name in ("dfl-fme.0", "dfl-port.0", "dfl-port.1"):
        process("serve", node=f"/dev/{name}")
    yield process
    assert process.close() == 0


@pytest.fixture
def node(host: Process, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("UMOCKDEV_DIR", host("root"))
    # umockdev rewrites paths to nodes in a folder of its own, which the daemon has no rule for.
    with Node(backend="dfl", sandbox="off") as made:
        made.own_store(manifest=True)
        made.wrapper = ("umockdev-wrapper",)
        yield made.up()


def held(host: Process) -> list[str]:
    folder = Path(host("root")) / f"sys{BASE}"
    return [(folder / f"dfl-port.{port}" / "afu_id").read_text().strip() for port in range(2)]


def test_an_allocations_life_on_a_card_that_libudev_found(host: Process, node: Node) -> None:
    kubelet = node.kubelet
    assert held(host) == [BLANK, BLANK]
    answer = kubelet.allocate(P1)
    assert answer.envs["FPGA_DEVICE_0000_3B_00_0_P1"] == answer.envs["FPGA_DEVICE_1"]
    assert answer.envs["FPGA_DEVICE_1"] == "/dev/dfl-port.1"
    assert [(d.container_path, d.host_path) for d in answer.devices] == [
        ("/dev/dfl-port.1", "/dev/dfl-port.1")
    ]
    assert kubelet.endpoints[REGION].numa == {P0: [1], P1: [1]}

    kubelet.prestart(P1, env=request())
    assert held(host) == [BLANK, AFU]
    with pytest.raises(Refused, match="FPGA_DRIVER_PARAMS_1") as caught:
        kubelet.prestart(P1, env=request(params="clock=100"))
    assert caught.value.code == "FAILED_PRECONDITION"  # no documented way to set it

    # The FPGA reports an error: nothing was loaded, and the port still answers.
    host("answer", node="/dev/dfl-fme.0", errno=errno.EIO)
    with pytest.raises(Refused, match="the FPGA reported an error") as caught:
        kubelet.prestart(P1, env=request(AFU_2))
    assert caught.value.code == "INTERNAL"
    host("answer", node="/dev/dfl-fme.0", errno=0)
    kubelet.prestart(P1, env=request(AFU_2))
    assert held(host) == [BLANK, AFU_2]

    kubelet.until(WHOLE, {})
    kubelet.deallocate(P1)
    kubelet.until(WHOLE, {CARD: HEALTHY})
    assert held(host) == [BLANK, BLANK]
    images = [each["image"][:32] for each in host("ioctls", count=0) if "image" in each]
    assert images == [BLANK, BLANK, AFU, AFU_2, BLANK, AFU_2, BLANK]


def test_a_scrub_that_the_kernel_calls_done_without_doing_it_is_found_out(
    host: Process, node: Node
) -> None:
    kubelet = node.kubelet
    kubelet.allocate(P0)
    kubelet.prestart(P0, env=request())
    host("follow", ports=[])  # as on a poisoned port: PRs return 0 and load nothing
    mark = node.plugin.mark
    kubelet.deallocate(P0)
    node.plugin.until_logged(
        "region not scrubbed", mark, region=P0, condition="FAULTED", afu_id=AFU
    )
    kubelet.until(REGION, {P0: UNHEALTHY, P1: HEALTHY})
    kubelet.until(WHOLE, {CARD: UNHEALTHY})
    with pytest.raises(Refused, match="FAILED_PRECONDITION"):
        kubelet.allocate(P0)


def test_uevents_take_cards_off_the_list_and_put_them_on(host: Process, node: Node) -> None:
    host("remove", path=f"/sys{BASE}")
    host("uevent", path=f"/sys{PCI}", action="unbind")
    node.kubelet.until(REGION, {})
    node.kubelet.until(WHOLE, {})
    host("add", devices=card(number=4, address=OTHER_ADDRESS))
    # Nothing answers its ioctls, so that nothing can be scrubbed.
    node.kubelet.until(REGION, {f"{OTHER}-p0": UNHEALTHY})
    node.kubelet.until(WHOLE, {OTHER: UNHEALTHY})
