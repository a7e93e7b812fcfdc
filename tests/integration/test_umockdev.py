"""The DFL backend against umockdev: the real libudev, device nodes, uevents, ioctls as bytes."""

import errno
import json
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("umockdev")

HERE = Path(__file__).parent
TIMEOUT = 30.0
INTERFACE = "ce48969398f05f33946d560708be108a"
AFU = "d8424dc4a4a3c413f89e433683f9040b"
ADDRESS, CARD = "0000:3b:00.0", "0000-3b-00.0"
PCI = f"/devices/pci0000:3a/{ADDRESS}"
BASE = f"{PCI}/fpga_region/region0"
OTHER_ADDRESS, OTHER = "0000:d8:00.0", "0000-d8-00.0"


class Process:
    """A process that takes commands and gives answers, and its news, as JSON lines."""

    def __init__(self, *command: str, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            ["umockdev-wrapper", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
        )
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self.recorder: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            (self._answers[message["id"]] if "id" in message else self.recorder).put(message)
        for answer in list(self._answers.values()):
            answer.put({"error": "the process has ended", "message": "see its stderr"})

    def begin(self, do: str, **names: Any) -> int:
        """Send a command; its number, for `end`."""
        number = len(self._answers)
        self._answers[number] = queue.SimpleQueue()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "do": do, **names}) + "\n")
        self._process.stdin.flush()
        return number

    def end(self, number: int) -> dict[str, Any]:
        """The answer to a command."""
        return self._answers[number].get(timeout=TIMEOUT)

    def answered(self, number: int) -> bool:
        return not self._answers[number].empty()

    def __call__(self, do: str, **names: Any) -> Any:
        answer = self.end(self.begin(do, **names))
        return answer.get("reply", answer)

    def close(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        self._process.stdout.close()
        return code


@pytest.fixture
def host() -> Iterator[Process]:
    """The testbed: no devices yet, but the directories to which their driver links lead."""
    process = Process("/usr/bin/python3", str(HERE / "umockdev_host.py"))
    for driver in ("dfl-fme", "dfl-port"):
        (Path(process("root")) / "sys/bus/platform/drivers" / driver).mkdir(parents=True)
    yield process
    process("release")
    assert process.close() == 0


@pytest.fixture
def plugin(host: Process) -> Iterator[Process]:
    """The backend and the watch, in the testbed."""
    process = Process(
        sys.executable,
        str(HERE / "umockdev_child.py"),
        env={"UMOCKDEV_DIR": host("root"), "PYTHONPATH": str(HERE.parents[1])},
    )
    yield process
    assert process.close() == 0


def device(
    path: str, subsystem: str, *, driver: str = "", node: str = "", **attributes: str
) -> str:
    """One device in umockdev's own form."""
    lines = [f"P: {path}"]
    if node:
        minor = node.rpartition(".")[2]
        lines += [f"N: {node}", f"E: DEVNAME=/dev/{node}", "E: MAJOR=240", f"E: MINOR={minor}"]
    lines += [f"E: SUBSYSTEM={subsystem}"]
    lines += [f"A: {name.replace('__', '/')}={text}\\n" for name, text in attributes.items()]
    if driver:
        lines += [f"L: driver=../../../../../../bus/platform/drivers/{driver}"]
    return "\n".join(lines) + "\n\n"


def port(number: int, port_id: int, *, base: str = BASE) -> str:
    return device(
        f"{base}/dfl-port.{number}",
        "platform",
        driver="dfl-port",
        node=f"dfl-port.{number}",
        id=str(port_id),
        afu_id=AFU,
        power_state="0x0",
        errors__errors="0x0",
    )


def card(*, ports: int = 1, number: int = 0, address: str = ADDRESS) -> str:
    """A card with its FME and ports; nodes count from `number`."""
    pci = f"/devices/pci0000:3a/{address}"
    base = f"{pci}/fpga_region/region{number * 10}"
    fme = f"{base}/dfl-fme.{number}"
    return (
        device(pci, "pci", vendor="0x8086", device="0x09c4", numa_node="1")
        + device(base, "fpga_region")
        + device(
            fme,
            "platform",
            driver="dfl-fme",
            node=f"dfl-fme.{number}",
            ports_num=str(ports),
            bitstream_id="0x23000110010309",
            errors__catfatal_errors="0x0",
        )
        + device(f"{fme}/dfl-fme-region.{number + 3}", "platform")
        + device(
            f"{fme}/dfl-fme-region.{number + 3}/fpga_region/region{number * 10 + 1}",
            "fpga_region",
            compat_id=INTERFACE,
        )
        + "".join(port(number + each, each, base=base) for each in range(ports))
    )


def image_of(size: int) -> bytes:
    """Bytes that do not repeat within a page, an odd number of them."""
    return b"".join(struct.pack("<I", number) for number in range(size // 4 + 1))[: size | 1]


def test_a_card_is_found_in_a_tree_that_libudev_knows(host: Process, plugin: Process):
    assert plugin("scan") == {"cards": {}, "problems": {}}
    host("add", devices=card(ports=2))
    assert plugin("scan") == {
        "problems": {},
        "cards": {
            CARD: {
                "interface_id": INTERFACE,
                "numa_node": 1,
                "fme_node": "/dev/dfl-fme.0",
                "complete": True,
                "regions": {f"{CARD}-p0": "/dev/dfl-port.0", f"{CARD}-p1": "/dev/dfl-port.1"},
                "afu_ids": {f"{CARD}-p0": AFU, f"{CARD}-p1": AFU},
                "failed": {},
            }
        },
    }


def recorder(host: Process, plugin: Process) -> list[str | None]:
    """The cards named since the last time, up to an event sent now about a card of its own."""
    host("uevent", path=f"/sys/devices/pci0000:3a/{OTHER_ADDRESS}", action="bind")
    named = []
    while (card := plugin.recorder.get(timeout=TIMEOUT)["changed"]) != OTHER:
        named.append(card)
    return named


def test_the_watch_names_a_card_that_comes_and_goes(host: Process, plugin: Process):
    host("add", devices=device(f"/devices/pci0000:3a/{OTHER_ADDRESS}", "pci"))
    plugin("watch")
    assert recorder(host, plugin) == []
    host("add", devices=card())  # an event `add` for each device
    assert set(recorder(host, plugin)) == {CARD}
    host("uevent", path=f"/sys{BASE}/dfl-port.0", action="bind")
    assert recorder(host, plugin) == [CARD]
    assert CARD in plugin("scan")["cards"]
    host("uevent", path=f"/sys{BASE}/dfl-port.0", action="remove")
    assert recorder(host, plugin) == [CARD]
    host("remove", path=f"/sys{PCI}")
    assert plugin("scan")["cards"] == {}


def test_events_of_other_devices_are_passed_over(host: Process, plugin: Process):
    network = "/devices/pci0000:3a/0000:3a:1f.0/net/eth0"
    host("add", devices=device(f"/devices/pci0000:3a/{OTHER_ADDRESS}", "pci"))
    host("add", devices=card() + device(network, "net"))
    plugin("watch")
    for path, action in (
        (f"/sys{network}", "add"),
        (f"/sys{PCI}", "change"),
        (f"/sys{BASE}/dfl-port.0", "change"),
        (f"/sys{BASE}/dfl-fme.0/dfl-fme-region.3", "add"),
    ):
        host("uevent", path=path, action=action)
    assert recorder(host, plugin) == []


def test_a_failing_attribute_is_that_cards_problem_only(host: Process, plugin: Process):
    host("add", devices=card() + card(number=4, address=OTHER_ADDRESS))
    host("set", path=f"/sys{BASE}/dfl-fme.0", name="ports_num", value="none\n")
    found = plugin("scan")
    assert list(found["cards"]) == [OTHER]
    assert list(found["problems"]) == [CARD]
    host("set", path=f"/sys{BASE}/dfl-fme.0", name="ports_num", value="1\n")
    host("set", path=f"/sys{BASE}/dfl-fme.0", name="errors/catfatal_errors", value="0x10\n")
    found = plugin("scan")
    assert found["problems"] == {}
    assert "DramFatalErr" in found["cards"][CARD]["failed"][f"{CARD}-p0"]
    assert found["cards"][OTHER]["failed"] == {}


def serve(host: Process) -> None:
    host("add", devices=card(ports=2))
    for node in ("/dev/dfl-port.1", "/dev/dfl-fme.0"):
        host("serve", node=node)


def test_the_driver_gets_the_image_byte_for_byte(host: Process, plugin: Process):
    serve(host)
    image = image_of(1 << 20)
    plugin("use", region=f"{CARD}-p1", image=image.hex())
    reset, pr = host("ioctls", count=2)
    assert reset == {"node": "/dev/dfl-port.1", "request": 0xB640}
    assert (pr["node"], pr["request"]) == ("/dev/dfl-fme.0", 0xB680)
    argsz, flags, port_id, size, address = struct.unpack("<IIIIQ", bytes.fromhex(pr["argument"]))
    assert (argsz, flags, port_id, size) == (24, 0, 1, len(image))
    assert address
    assert bytes.fromhex(pr["image"]) == image


def test_the_event_loop_runs_on_during_a_pr(host: Process, plugin: Process):
    serve(host)
    host("hold", node="/dev/dfl-fme.0")
    using = plugin.begin("use", region=f"{CARD}-p1", image="00ff")
    assert len(host("ioctls", count=2)) == 2  # the reset, and the PR that now hangs
    assert plugin("ping") is None
    assert not plugin.answered(using)
    host("release")
    assert plugin.end(using)["reply"] is None


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EIO, "the FPGA reported an error"),
        (errno.ETIMEDOUT, "in time"),
        (errno.EINVAL, "port does not exist"),
        (errno.EBUSY, "another process"),
    ],
)
def test_a_failed_pr_is_told_by_its_errno(host: Process, plugin: Process, number: int, says: str):
    serve(host)
    host("answer", node="/dev/dfl-fme.0", errno=number)
    answer = plugin("use", region=f"{CARD}-p1", image="00ff")
    assert answer["error"] == "ProgrammingError"
    assert says in answer["message"]


def test_a_port_that_does_not_acknowledge_its_reset_is_not_programmed(
    host: Process, plugin: Process
):
    serve(host)
    host("answer", node="/dev/dfl-port.1", errno=errno.ETIMEDOUT)
    answer = plugin("use", region=f"{CARD}-p1", image="00ff")
    assert answer["error"] == "HardwareError"
    assert [each["request"] for each in host("ioctls", count=1)] == [0xB640]


def test_a_node_without_its_driver_is_an_error_and_no_crash(host: Process, plugin: Process):
    host("add", devices=card())
    answer = plugin("use", region=f"{CARD}-p0")
    assert answer["error"] == "HardwareError"
    assert "ENOTTY" in answer["message"]
