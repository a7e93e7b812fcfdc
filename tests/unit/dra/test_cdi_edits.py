"""What a claim's file reports the container runtime: its own nodes, to those who asked for them.

When the file is there at all is in test_files.py.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.cards import device, make_card
from ledger_support import make_ledger
from test_dra_steps import POD, A, B, owner

from fpga_plugin.allocation.journal.records import Allocation, ClaimOwner
from fpga_plugin.dra.cdi import CdiError, CdiFiles, device_id, request_variable
from fpga_plugin.ids import DeviceId
from fpga_plugin.kubernetes.names import ClaimUid

ONE, TWO = make_card(1, nodes=(0, 1), shared=("/dev/vfio/vfio",)), make_card(2, nodes=(2, 3))
DRIVER = "fpga.intel.com"


def taken(*devices: DeviceId, requests: dict[DeviceId, tuple[str, ...]]) -> tuple[ClaimOwner, Any]:
    ledger, _ = make_ledger(ONE, TWO)
    asked = replace(owner(A, *devices), requests=requests)
    claims = ledger.dra.take(asked, [POD])
    return ledger.claim_owners[A], claims


@pytest.fixture
def region() -> tuple[ClaimOwner, tuple[Allocation, ...]]:
    return taken(device(ONE, 0), requests={device(ONE, 0): ("fpga",)})


def written(path: Path) -> dict[str, Any]:
    (file,) = path.glob("*.json")
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def env(edits: Any) -> dict[str, str]:
    return dict(line.split("=", 1) for line in edits["env"])


def test_a_container_gets_the_nodes_of_its_requests_and_no_others(tmp_path: Path) -> None:
    region, card = device(ONE, 0), device(TWO)
    files = CdiFiles(str(tmp_path), DRIVER)
    known, claims = taken(region, card, requests={region: ("fast", "any-1"), card: ("any-1",)})
    files.write(known, claims, {})
    told = written(tmp_path)
    assert (told["cdiVersion"], told["kind"]) == ("0.5.0", f"k8s.{DRIVER}/claim")
    first, second = told["devices"]
    assert [first["name"], second["name"]] == [
        device_id(known, one).removeprefix(f"k8s.{DRIVER}/claim=") for one in (region, card)
    ]
    nodes = [
        [node["path"] for node in one["containerEdits"]["deviceNodes"]] for one in (first, second)
    ]
    assert nodes == [
        ["/dev/vfio/vfio", "/dev/dfl-port.0"],
        ["/dev/dfl-port.2", "/dev/dfl-port.3"],
    ]
    assert all(
        node == {"path": node["path"], "hostPath": node["path"], "permissions": "rw"}
        for node in first["containerEdits"]["deviceNodes"]
    )
    mine, theirs = env(first["containerEdits"]), env(second["containerEdits"])
    assert mine["FPGA_REQUEST_FAST"] == "/dev/dfl-port.0"
    assert mine["FPGA_REQUEST_ANY_1"] == "/dev/dfl-port.0,/dev/dfl-port.2,/dev/dfl-port.3"
    assert theirs["FPGA_REQUEST_ANY_1"] == mine["FPGA_REQUEST_ANY_1"]
    assert "FPGA_REQUEST_FAST" not in theirs
    assert any(name.startswith("FPGA_DEVICE_0000") for name in mine), "by the region's id"
    assert "mounts" not in first["containerEdits"]


def test_a_container_finds_all_devices_of_a_request_as_by_the_first_door(tmp_path: Path) -> None:
    """Whichever of them the runtime injects last: a program of that api runs here unchanged."""
    one, two, card = device(ONE, 1), device(ONE, 0), device(TWO)
    CdiFiles(str(tmp_path), DRIVER).write(
        *taken(one, two, card, requests=dict.fromkeys((one, two, card), ("fpga",))), {}
    )
    of_request = re.compile(r"FPGA_(REQUEST_.*|DEVICES_.*|DEVICE_[0-9]+)")
    for each in written(tmp_path)["devices"]:
        found = env(each["containerEdits"])
        assert {name: value for name, value in found.items() if of_request.fullmatch(name)} == {
            "FPGA_REQUEST_FPGA": "/dev/dfl-port.0,/dev/dfl-port.1,/dev/dfl-port.2,/dev/dfl-port.3",
            "FPGA_DEVICES_REGION_CE489693": "/dev/dfl-port.0,/dev/dfl-port.1",
            "FPGA_DEVICES_FPGA_CE489693": "/dev/dfl-port.2,/dev/dfl-port.3",
            "FPGA_DEVICE_1": "/dev/dfl-port.0",
            "FPGA_DEVICE_2": "/dev/dfl-port.1",
            "FPGA_DEVICE_3": "/dev/dfl-port.2",
            "FPGA_DEVICE_4": "/dev/dfl-port.3",
        }


@pytest.mark.parametrize(
    ("request_name", "variable"),
    [
        ("fpga", "FPGA_REQUEST_FPGA"),
        ("a-b.c", "FPGA_REQUEST_A_B_C"),
        ("stra\u00dfe", "FPGA_REQUEST_STRASSE"),
        ("\u0661", "FPGA_REQUEST__"),
    ],
)
def test_a_requests_name_becomes_a_variables(request_name: str, variable: str) -> None:
    assert request_variable(request_name) == variable


# ------------------------------------------------------------------ the directory


def test_only_files_of_claims_that_are_kept_stay_and_other_drivers_stay_too(
    tmp_path: Path, region: Any
) -> None:
    files = CdiFiles(str(tmp_path), DRIVER)
    files.write(*region, {})
    others = ["gpu.json", f"k8s.{DRIVER}-claim_x.yaml", f"k8s.gpu.example.com-claim_{B}.json"]
    for name in (*others, f"k8s.{DRIVER}-claim_{B}.json", f"k8s.{DRIVER}-claim_{A}.json.new"):
        (tmp_path / name).write_text("{}")
    files.keep({A})
    assert {path.name for path in tmp_path.iterdir()} == {*others, f"k8s.{DRIVER}-claim_{A}.json"}
    files.keep(())
    assert {path.name for path in tmp_path.iterdir()} == {*others}
    CdiFiles(str(tmp_path / "gone"), DRIVER).keep({A})
    (tmp_path / f"k8s.{DRIVER}-claim_0.json").mkdir()
    for number in range(1, 9):
        (tmp_path / f"k8s.{DRIVER}-claim_{number}.json").write_text("{}")
    files.keep(())
    assert not list(tmp_path.glob("*claim_[1-9].json")), "one that cannot go keeps none"


def test_what_cannot_be_removed_is_told_and_what_is_gone_is_not(
    tmp_path: Path, region: Any
) -> None:
    """A file that stays lets containers start with what became somebody else's."""
    files = CdiFiles(str(tmp_path), DRIVER)
    files.remove(files.path(A), A)
    files.write(*region, {})
    files.remove(files.path(A), A)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"k8s.{DRIVER}-claim_{A}.json").mkdir()
    with pytest.raises(CdiError, match="cannot be removed"):
        files.remove(files.path(A), A)


def test_a_directory_is_made_and_what_cannot_be_written_is_told(
    tmp_path: Path, region: Any
) -> None:
    files = CdiFiles(str(tmp_path / "run" / "cdi"), DRIVER)
    files.write(*region, {})
    assert written(tmp_path / "run" / "cdi")
    (tmp_path / "file").write_text("")
    with pytest.raises(CdiError, match="cannot be written"):
        CdiFiles(str(tmp_path / "file"), DRIVER).write(*region, {})


@pytest.mark.parametrize("uid", ["../x", "", "a/b"])
def test_no_path_is_made_of_what_is_no_uid(tmp_path: Path, region: Any, uid: str) -> None:
    """Invariant 11."""
    files = CdiFiles(str(tmp_path), DRIVER)
    known, claims = region
    with pytest.raises(ValueError, match="uid"):
        files.path(ClaimUid(uid))
    with pytest.raises(ValueError, match="uid"):
        files.write(replace(known, uid=ClaimUid(uid)), claims, {})
