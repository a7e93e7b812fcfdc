"""Pods with claims on the real kubelet, in real containers: each way to ask, from begin to end."""

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from daemon_support import AFU, AFU_2, BLANK, CARD, CARD_2, P0, P1, request
from doubles.samples import copy_samples
from machine import RELEASE, SCRATCH, STAY, until
from node import Pod, kep_container
from node import container as by_limits
from pods_node import (
    API,
    CDI,
    Node,
    asking,
    by_claim,
    by_template,
    config,
    container,
    dns,
    health,
    running,
    waiting,
)

LOOK = (
    'echo "device $FPGA_DEVICE_0000_10_00_0_P0"; echo "request $FPGA_REQUEST_FPGA";'
    " for n in 0 1 2 3; do test -e /dev/dfl-port.$n && echo has $n; done;"
    " exec 3<>/dev/dfl-port.0 && echo opened;"
)
"""What a container says of what it was given."""


def test_a_pod_by_template_has_its_region_programmed_and_leaves_it_blank(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    pod = node.asks("asks", command=LOOK, bitstream=AFU)
    pod.until_running()
    assert node.afu(P0) == AFU
    seen = "device /dev/dfl-port.0\nrequest /dev/dfl-port.0\nhas 0\nopened"
    until(lambda: pod.output() == seen, "the container has its port and no other")
    assert node.afu(P1) == BLANK
    pod.delete()
    pod.until_gone()
    node.until_free(P0, P1, CARD)
    assert (node.afu(P0), node.afu(P1)) == (BLANK, BLANK)
    again = node.asks("again", bitstream=AFU_2)
    again.until_running()
    assert node.afu(P0) == AFU_2


def test_a_container_gets_the_cdi_devices_that_the_operator_adds(
    make_node: Callable[..., Node],
) -> None:
    """A mount, a variable and a node, from a CDI file; once where two devices have it."""
    added = SCRATCH / "added"
    added.mkdir(exist_ok=True)
    (added / "hello").write_text("from the node")
    edits = {
        "env": ["ADDED=yes"],
        "mounts": [
            {
                "hostPath": str(added),
                "containerPath": "/opt/added",
                "options": ["rbind", "rprivate", "ro"],
            }
        ],
        "deviceNodes": [{"path": "/dev/kmsg"}],
    }
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "example.com/added",
        "devices": [{"name": "one", "containerEdits": edits}],
    }
    node = make_node("1x2", cdi_devices="*=example.com/added=one")
    file = CDI / "example.com-added.json"
    file.write_text(json.dumps(spec))
    template = {"spec": {"spec": asking("region", bitstream=AFU)}}
    template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] = 2
    path = f"{API}/namespaces/default/resourceclaimtemplates"
    node.cluster.call("POST", path, template | {"metadata": {"name": "both"}})
    command = (
        'echo "$ADDED $(cat /opt/added/hello)"; echo >/opt/added/new || echo kept;'
        " test -c /dev/kmsg && echo node;"
        " exec 3<>/dev/dfl-port.0 4<>/dev/dfl-port.1 && echo opened;"
    )
    pod = node.pod("asks", container(command), resourceClaims=[by_template("both")])
    pod.until_running()
    seen = ["yes from the node", "kept", "node", "opened"]

    def said() -> list[str]:
        return [line for line in pod.output().splitlines() if line in seen]

    until(lambda: said() == seen, "the container has all of it")
    file.unlink()


def test_a_class_pins_the_bitstream_of_pods_that_say_nothing(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    path = f"{API}/deviceclasses"
    of_regions = node.cluster.call("GET", f"{path}/fpga-region-ce489693")["spec"]["selectors"]
    pinned = {"selectors": of_regions, "config": [config(bitstream=AFU)]}
    node.cluster.call("POST", path, {"metadata": {"name": "pinned"}, "spec": pinned})
    try:
        node.asks("obeys", "pinned").until_running()
        assert node.afu(P0) == AFU
        other = node.asks("disobeys", "pinned", bitstream=AFU_2)
        node.until_refused(AFU_2)
        assert (node.phase(other), node.afu(P1)) == ("Pending", BLANK)
    finally:
        node.cluster.call("DELETE", f"{path}/pinned")


def test_a_pod_of_the_device_plugin_runs_unchanged(make_node: Callable[..., Node]) -> None:
    """By limits and FPGA_* variables, as `tests/kubelet` gives it to the device plugin."""
    node = make_node("1x2")
    command = (
        'echo "$FPGA_DEVICE_1 $FPGA_DEVICES_REGION_CE489693 $FPGA_DEVICE_0000_10_00_0_P0'
        ' $FPGA_REQUEST_CONTAINER_0_REQUEST_0"; exec 3<>"$FPGA_DEVICE_1" && echo opened;'
    )
    pod = node.pod("asks", by_limits(env=request(params="clock=250"), command=command + STAY))
    pod.until_running()
    assert node.afu(P0) == AFU
    assert node.regions()[P0]["clock"] == 250
    seen = f"{' '.join(['/dev/dfl-port.0'] * 4)}\nopened"
    until(lambda: pod.output() == seen, "the container has its port")
    pod.delete()
    pod.until_gone()
    node.until_free(P0, CARD)
    assert node.afu(P0) == BLANK


def test_the_pod_of_the_kep_runs_unchanged(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    pod = node.pod("kep", kep_container(f'exec 3<>"$FPGA_DEVICE_1" && echo opened; {STAY}'))
    pod.until_running("intel-fpga-demo-compress")
    assert node.afu(P0) == AFU
    assert node.regions()[P0]["clock"] == 1000
    until(lambda: pod.output("intel-fpga-demo-compress") == "opened", "it opens its port")
    pod.delete()
    pod.until_gone()
    node.until_free(P0, CARD)
    assert node.afu(P0) == BLANK


def test_a_whole_card_and_its_regions_wait_for_each_other(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    whole = node.asks("whole", "card", command=LOOK, bitstream=AFU)
    whole.until_running()
    assert {node.afu(P0), node.afu(P1)} == {AFU}
    both = "request /dev/dfl-port.0,/dev/dfl-port.1\nhas 0\nhas 1\nopened"
    until(lambda: whole.output().endswith(both), "the container has all ports of the card")
    part = node.asks("part", bitstream=AFU_2)
    until(lambda: node.cluster.events("FailedScheduling"), "the scheduler has nothing for it")
    assert not part.seen(), "kubelet does not hear of it"
    whole.delete()
    part.until_running()
    assert sorted([node.afu(P0), node.afu(P1)]) == sorted([AFU_2, BLANK])


def test_a_pod_has_several_claims_and_one_call_for_all(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2")
    names = [node.template("one", bitstream=AFU), node.template("two", bitstream=AFU_2)]
    claims = [by_template(name, name) for name in names]
    look = "for n in 0 1 2 3; do test -e /dev/dfl-port.$n && echo has $n; done;"
    first, second = container(look, "one", name="first"), container(look, "two", name="second")
    pod = node.pod("asks", first, second, resourceClaims=claims)
    pod.until_running("first")
    pod.until_running("second")
    assert {node.afu(P0), node.afu(P1)} == {AFU, AFU_2}
    with_afu = {node.afu(P0): "has 0", node.afu(P1): "has 1"}
    until(lambda: pod.output("first") == with_afu[AFU], "a container has what its claim has")
    until(lambda: pod.output("second") == with_afu[AFU_2], "and not what another's has")
    assert len(node.served("NodePrepareResources")) == 2
    pod.delete()
    pod.until_gone()
    node.until_free(P0, P1)
    assert (node.afu(P0), node.afu(P1)) == (BLANK, BLANK)


def test_several_pods_of_a_claim_share_it_until_the_last_has_ended(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    claim = node.claim("shared", bitstream=AFU)
    first = node.pod("first", container(LOOK), resourceClaims=[by_claim(claim)])
    first.until_running()
    second = node.pod("second", container(LOOK), resourceClaims=[by_claim(claim)])
    second.until_running()
    until(lambda: second.output() == first.output() != "", "the second has the same")
    assert len(node.served("NodePrepareResources")) == 1, "no call reports the second"
    first.delete()
    first.until_gone()
    assert (node.afu(P0), node.served("NodeUnprepareResources")) == (AFU, [])
    second.delete()
    second.until_gone()
    assert len(node.served("NodeUnprepareResources")) == 1
    assert node.afu(P0) == BLANK
    node.until_free(P0)


def test_a_container_that_restarts_keeps_its_accelerator_as_it_was(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x2")
    pod = node.asks("asks", command=LOOK, bitstream=AFU)
    first = pod.until_running()
    until(lambda: pod.output().count("opened") == 1, "it has its port")
    mark = node.plugin.mark
    node.runtime.kill(first)
    pod.until_running(after=first)
    until(lambda: pod.output().count("opened") == 2, "it has its port again")
    assert node.afu(P0) == AFU
    assert not node.served("NodePrepareResources", mark)
    assert not node.prepared(P0, mark)


def test_a_prepare_that_fails_holds_the_pod_until_it_succeeds(
    make_node: Callable[..., Node],
) -> None:
    """There is no sandbox before; kubelet tries again by itself."""
    store = SCRATCH / "store"
    copy_samples(store)
    (later,) = store.glob(f"*/{AFU}.gbs")
    content = later.read_bytes()
    later.unlink()
    node = make_node("1x2", bitstream_dir=str(store))
    pod = node.asks("asks", bitstream=AFU)
    assert AFU in node.until_refused(AFU)
    assert (node.phase(pod), node.sandboxes()) == ("Pending", [])
    assert node.afu(P0) == BLANK
    new = later.with_suffix(".new")
    new.write_bytes(content)
    new.replace(later)
    waiting(lambda: node.served("NodePrepareResources"), "kubelet tries again")
    pod.until_running()
    assert node.afu(P0) == AFU


def test_an_unprepare_that_fails_holds_the_pod_until_it_succeeds(
    make_node: Callable[..., Node],
) -> None:
    """A tool on the node has the port open, so that nobody can scrub it, for longer than the call.

    The region is not given to the pod that waits for it.
    """
    node = make_node("1x1")
    pod, _ = running(node)
    mark = node.plugin.mark
    in_use = arm(node, "port-open")
    pod.delete()
    error = until_unprepare_fails(node, mark)
    assert "0000-10-00.0-p0 not scrubbed after 40 s" in error
    assert node.plugin.logged("scrub waits", mark, region=P0)
    nothing_is_given_away(node, pod, mark)
    in_use.unlink()
    unprepare_succeeds(node, pod, mark)


def test_an_unprepare_on_a_full_disk_holds_the_pod_until_there_is_room(
    make_node: Callable[..., Node],
) -> None:
    """The claim's end cannot be journalled: it has not ended, and the call says so at once."""
    disk = SCRATCH / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "disk", disk], check=True)
    try:
        simulated = SCRATCH / "plugin/simulated"
        node = make_node("1x1", state_dir=str(disk), simulated_dir=str(simulated))
        pod, _ = running(node)
        mark = node.plugin.mark
        filler = disk / "filler"
        fill(filler)
        pod.delete()
        assert "full" in until_unprepare_fails(node, mark)
        assert not node.plugin.logged("claim ended", mark)
        nothing_is_given_away(node, pod, mark)
        filler.unlink()
        unprepare_succeeds(node, pod, mark)
        assert node.plugin.stop() == 0
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_region_that_cannot_be_cleaned_holds_up_no_pod_and_is_given_to_nobody(
    make_node: Callable[..., Node],
) -> None:
    """The scheduler knows before the region is free: else the pod that waits would be evicted."""
    node = make_node("2x1")
    pod, _ = running(node)
    second = node.asks("second", bitstream=AFU)
    second.until_running()
    waits = node.asks("waits", bitstream=AFU_2)
    until(lambda: node.cluster.events("FailedScheduling"), "the scheduler has nothing for it")
    arm(node, "pr-error")
    pod.delete()
    pod.until_gone()
    until(lambda: len(node.allocated()) == 1, "its claim is free")
    assert dns(P0) not in node.free()
    second.delete()
    waits.until_running()
    assert [*node.allocated().values()] == [[dns(f"{CARD_2}-p0")]]
    assert node.afu(f"{CARD_2}-p0") == AFU_2
    assert node.afu(P0) != AFU_2, "nobody was given it"


def arm(node: Node, word: str) -> Path:
    """A fault of the first region; its file."""
    fault = node.state / "simulated/faults" / P0
    fault.parent.mkdir(exist_ok=True)
    fault.write_text(word)
    return fault


def fill(path: Path) -> None:
    """Leave no room on a disk."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def until_unprepare_fails(node: Node, since: int) -> str:
    """Wait for the error that kubelet is answered, and for kubelet to tell it; the error."""
    method = "NodeUnprepareResources"
    refused = waiting(
        lambda: node.plugin.logged("claim refused", since, method=method), "Unprepare fails"
    )
    error = str(refused[0]["message"])
    log = SCRATCH / "kubelet.log"
    until(lambda: error[:60] in log.read_text(errors="replace"), "kubelet has heard it")
    return error


def nothing_is_given_away(node: Node, pod: Pod, since: int) -> None:
    """The pod stays with its region, which is as it left it; another pod gets nothing."""
    (mine,) = node.allocated()
    other = node.asks("other", bitstream=AFU_2)
    until(lambda: node.cluster.events("FailedScheduling"), "the scheduler has nothing for it")
    assert not other.seen(), "kubelet does not hear of it"
    assert list(node.allocated()) == [mine]
    assert pod.seen()
    assert node.afu(P0) == AFU
    assert not node.plugin.logged("region scrubbed", since, region=P0)
    assert not node.served("NodeUnprepareResources", since)
    other.delete()


def unprepare_succeeds(node: Node, pod: Pod, since: int) -> None:
    """Kubelet asks again, once; then the region is blank, and the next pod's."""
    waiting(lambda: node.served("NodeUnprepareResources", since), "kubelet asks again")
    assert node.plugin.logged("region scrubbed", since, region=P0)
    assert node.afu(P0) == BLANK
    pod.until_gone()
    node.until_free(P0)
    assert len(node.served("NodeUnprepareResources", since)) == 1
    assert not node.holders()
    running(node, "next", AFU_2)
    assert node.afu(P0) == AFU_2


def test_admin_access_is_refused_and_takes_nothing(make_node: Callable[..., Node]) -> None:
    """The scheduler of 1.36 gives it a free region only: it looks at the card's counters."""
    node = make_node("1x2")
    owner = node.asks("owner", bitstream=AFU)
    owner.until_running()
    admin = node.asks("admin", admin_access=True)
    node.until_refused("adminAccess")
    assert node.phase(admin) == "Pending"
    assert (node.afu(P0), node.afu(P1)) == (AFU, BLANK)
    admin.delete()
    admin.until_gone()
    assert node.afu(P0) == AFU


def test_a_pod_whose_region_breaks_is_told_so_in_its_status(make_node: Callable[..., Node]) -> None:
    node = make_node("1x2", health_interval="1")
    pod = node.asks("asks", bitstream=AFU)
    pod.until_running()
    until(lambda: health(pod) == ["Healthy"], "it is well")
    fault = arm(node, "thermal")
    until(lambda: health(pod) == ["Unhealthy"], "it is not")
    fault.unlink()
    until(lambda: health(pod) == ["Healthy"], "it is well again")
    if RELEASE >= (1, 37):  # before, kubelet has v1alpha1 only, and does not say so
        log = (SCRATCH / "kubelet.log").read_text(errors="replace")
        assert 'healthService="v1.DRAResourceHealth"' in log, "of what it is offered the newest"


def test_a_pod_that_cannot_start_on_broken_hardware_is_evicted(
    make_node: Callable[..., Node],
) -> None:
    node = make_node("1x1")
    arm(node, "pr-stuck")
    pod = node.asks("asks", bitstream=AFU)
    node.until_refused("PR")
    pod.until_gone()
    assert node.free() == set()


def test_many_pods_at_once_each_get_a_region_of_their_own(make_node: Callable[..., Node]) -> None:
    node = make_node("4x2")
    asked = [AFU, AFU_2] * 4
    pods = [node.asks(f"pod-{n}", bitstream=afu) for n, afu in enumerate(asked)]
    for pod in pods:
        pod.until_running()
    until(lambda: all(health(pod) == ["Healthy"] for pod in pods), "each is told that it is well")
    assert sorted(one["afu_id"] for one in node.regions().values()) == sorted(asked)
    for pod in pods:
        pod.delete()
    for pod in pods:
        pod.until_gone()
    until(lambda: not node.allocated(), "all claims are free")
    assert {one["afu_id"] for one in node.regions().values()} == {BLANK}
