"""What a claim's containers read about its devices (KEP-5304).

That upstream's own package reads the files is shown in tests/dra/test_pods_metadata.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.cards import INTERFACE, PREFIX, device, make_card
from ledger_support import make_ledger
from test_dra_steps import POD, A, B, owner

from fpga_plugin.allocation.journal.records import Allocation, ClaimOwner
from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.dra.metadata import MetadataError, MetadataFiles
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import DeviceId, functions_variable
from fpga_plugin.kubernetes.names import ClaimUid

IN_CONTAINER = "/var/run/kubernetes.io/dra-device-attributes"
PCI_BUS_ID = "resource.kubernetes.io/pciBusID"


def slot(*functions: str) -> Card:
    """An OFS card: its one region is behind these functions."""
    card = make_card(nodes=(0,))
    (region,) = card.regions
    env = {functions_variable(region.id): ",".join(functions)}
    return replace(card, regions=(replace(region, grant=Grant(("/dev/vfio/7",), env=env)),))


def taken(
    card: Card, *devices: DeviceId, **of_claim: Any
) -> tuple[ClaimOwner, tuple[Allocation, ...], dict[DeviceId, Card]]:
    ledger, _ = make_ledger(card)
    known = replace(owner(A, *devices), **of_claim)
    claims = ledger.dra.take(known, [POD])
    return ledger.claim_owners[known.uid], claims, dict.fromkeys(devices, card)


def read(path: Path | str) -> list[dict[str, Any]]:
    """All objects of the stream."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def attributes(path: str) -> dict[str, Any]:
    found: dict[str, Any] = read(path)[0]["requests"][0]["devices"][0]["attributes"]
    return found


def test_each_request_has_a_stream_of_all_versions_the_newest_first(tmp_path: Path) -> None:
    card = make_card()
    one, two = device(card, 0), device(card, 1)
    requests = {one: ("fast",), two: ("any",)}
    known, claims, cards = taken(card, one, two, requests=requests, subrequests={"any": "any/x"})
    mounts = MetadataFiles(str(tmp_path), "node-a").write(known, claims, cards)
    assert {name: mount.container_path for name, mount in mounts.items()} == {
        name: f"{IN_CONTAINER}/resourceclaims/c/{name}/{PREFIX}-metadata.json"
        for name in ("fast", "any")
    }
    assert all(mount.read_only for mount in mounts.values())
    newest, oldest = read(mounts["any"].host_path)
    assert newest.pop("apiVersion") == "metadata.resource.k8s.io/v1beta1"
    assert oldest.pop("apiVersion") == "metadata.resource.k8s.io/v1alpha1"
    assert newest == oldest
    (asked,) = newest.pop("requests")
    assert newest == {
        "kind": "DeviceMetadata",
        "metadata": {"name": "c", "namespace": "n", "uid": A, "generation": 1},
    }
    (told,) = asked["devices"]
    assert (asked["name"], told["driver"], told["pool"]) == ("any/x", PREFIX, "node-a")
    assert told["name"] == two.replace(".", "-")
    assert told["attributes"]["interfaceID"] == {"string": INTERFACE}
    assert told["attributes"]["type"] == {"string": "region"}


@pytest.mark.parametrize(
    ("functions", "told"),
    [
        (("0000:3b:00.1",), {"string": "0000:3b:00.1"}),
        (("0000:3b:00.1", "0000:3b:00.2"), None),
        ((), None),
    ],
)
def test_a_virtual_machine_is_told_of_the_one_function_that_it_may_have(
    tmp_path: Path, functions: tuple[str, ...], told: object
) -> None:
    """Never of the function by which the card is programmed; of several it would get a part."""
    card = slot(*functions)
    known, claims, cards = taken(card, device(card, 0))
    (mount,) = MetadataFiles(str(tmp_path), "node-a").write(known, claims, cards).values()
    assert attributes(mount.host_path).get(PCI_BUS_ID) == told


def test_a_claim_that_a_template_made_is_found_by_what_its_pod_calls_it(tmp_path: Path) -> None:
    card = make_card()
    known, claims, cards = taken(card, device(card, 0), pod_claim="my-fpga")
    (mount,) = MetadataFiles(str(tmp_path), "node-a").write(known, claims, cards).values()
    assert mount.container_path == (
        f"{IN_CONTAINER}/resourceclaimtemplates/my-fpga/fpga/{PREFIX}-metadata.json"
    )
    assert read(mount.host_path)[0]["podClaimName"] == "my-fpga"


@pytest.mark.parametrize("name", ["..", ".", "a/../../b", "../x", "a b", "a\n", "A", "-", "é"])
def test_a_name_that_is_no_part_of_a_path_becomes_none(tmp_path: Path, name: str) -> None:
    """Who makes a claim writes its annotations, and the mount's path is made of this one."""
    card, files = make_card(), MetadataFiles(str(tmp_path), "node-a")
    assert files.write(*taken(card, device(card, 0), pod_claim=name)) == {}
    requests = {device(card, 0): (name,)}
    assert files.write(*taken(card, device(card, 0), requests=requests)) == {}
    assert list(tmp_path.iterdir()) == []


def test_files_go_with_their_claim_and_what_nobody_knows_goes_at_the_start(tmp_path: Path) -> None:
    card, files = make_card(), MetadataFiles(str(tmp_path), "node-a")
    written = taken(card, device(card, 0))
    files.write(*written)
    (tmp_path / f"{B}_fpga.json").touch()
    (tmp_path / "notes.txt").touch()
    files.remove(lambda of: of != A)
    assert {path.name for path in tmp_path.iterdir()} == {f"{A}_fpga.json", "notes.txt"}
    files.remove(lambda of: of == "claim")
    assert (tmp_path / f"{A}_fpga.json").exists(), "of another claim whose uid begins alike"
    files.remove(lambda of: of == A)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_full_disk_is_named_and_starts_no_container(tmp_path: Path) -> None:
    card = make_card()
    (tmp_path / "file").touch()
    files = MetadataFiles(str(tmp_path / "file"), "node-a")
    with pytest.raises(MetadataError, match=r"claim n/c cannot be written to .*file"):
        files.write(*taken(card, device(card, 0)))


def test_the_runtime_mounts_what_a_request_reads_for_each_of_its_devices(tmp_path: Path) -> None:
    card = make_card()
    one, two = device(card, 0), device(card, 1)
    known, claims, cards = taken(card, one, two)
    files = MetadataFiles(str(tmp_path / "of"), "node-a")
    mounts = files.write(known, claims, cards)
    CdiFiles(str(tmp_path), PREFIX, files).write(known, claims, cards)
    (file,) = tmp_path.glob("*.json")
    for each in json.loads(file.read_text())["devices"]:
        assert each["containerEdits"]["mounts"] == [
            {
                "hostPath": mounts["fpga"].host_path,
                "containerPath": mounts["fpga"].container_path,
                "options": ["rbind", "rprivate", "ro"],
            }
        ]
    names = [each["name"] for each in read(mounts["fpga"].host_path)[0]["requests"][0]["devices"]]
    assert names == [one.replace(".", "-"), two.replace(".", "-")]


def test_containers_of_any_user_read_the_files_and_no_uid_leaves_the_directory(
    tmp_path: Path,
) -> None:
    card = make_card()
    directory = tmp_path / "metadata"
    known, claims, cards = taken(card, device(card, 0))
    MetadataFiles(str(directory), "node-a").write(known, claims, cards)
    (file,) = directory.iterdir()
    assert (file.stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o644, 0o755)
    with pytest.raises(ValueError, match="claim's uid"):
        MetadataFiles(str(directory), "node-a").write(
            replace(known, uid=ClaimUid("../escaped")), claims, cards
        )
    assert [*tmp_path.iterdir()] == [directory]
