"""A kernel in a dictionary, and cards in it as sysfs shows them, for tests to damage."""

import ctypes
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from doubles.cards import AFU, INTERFACE
from fpga_plugin.hardware.backend import Backend
from fpga_plugin.hardware.dfl import defs
from fpga_plugin.hardware.dfl.backend import DflBackend
from fpga_plugin.hardware.kernel import Handle
from fpga_plugin.hardware.model import Card

ADDRESS = "0000:3b:00.0"
CARD = "0000-3b-00.0"


def failure(number: int, path: str = "") -> OSError:
    return OSError(number, os.strerror(number), path)


@dataclass
class FakeRegisters:
    """Of a device node; `FakeKernel.on_register` is told what is written."""

    kernel: "FakeKernel"
    node: str

    def read(self, offset: int) -> int:
        return self.kernel.registers[self.node].get(offset, 0)

    def write(self, offset: int, value: int) -> None:
        self.kernel.registers[self.node][offset] = value
        self.kernel.on_register(self.node, offset, value)

    def close(self) -> None:
        self.kernel.log.append(f"unmap {self.node}")


@dataclass
class FakeKernel:
    """Attributes by path: a text, or the errno that reading gives. Links by path: a target."""

    files: dict[str, str | int] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    instances: dict[str, int] = field(default_factory=dict)
    stores: dict[str, Callable[[str], None]] = field(default_factory=dict)
    open_errors: dict[str, int] = field(default_factory=dict)
    pr: Callable[[int, bytes], int] = lambda port, image: 0
    reset_error: int = 0
    close_error: int = 0
    written: list[tuple[str, str]] = field(default_factory=list)
    opened: dict[int, tuple[str, int]] = field(default_factory=dict)
    ioctls: list[tuple[str, int, bytes | int]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    registers: dict[str, dict[int, int]] = field(default_factory=dict)
    on_register: Callable[[str, int, int], None] = lambda node, offset, value: None

    def boot_id(self) -> str:
        return "b0070000-0000-0000-0000-000000000000"

    def listdir(self, path: str) -> list[str]:
        inside = self.realpath(path) + "/"
        begin = len(inside)
        return sorted(
            {
                name[begin:].partition("/")[0]
                for names in (self.files, self.links)
                for name in names
                if name.startswith(inside)
            }
        )

    def realpath(self, path: str) -> str:
        for _ in range(40):
            end = 0
            while end < len(path):
                end = path.find("/", end + 1)
                end = len(path) if end < 0 else end
                if (link := path[:end]) in self.links:
                    path = self.links[link] + path[end:]
                    break
            else:
                break
        if path in self.files or path in self.links:
            return path
        inside = path + "/"
        for names in (self.files, self.links):
            for name in names:
                if name.startswith(inside):
                    return path
        raise failure(errno.ENOENT, path)

    def exists(self, path: str) -> bool:
        try:
            self.realpath(path)
        except FileNotFoundError:
            return False
        return True

    def instance(self, path: str) -> int:
        return self.instances.get(self.realpath(path), 1)

    def read(self, path: str) -> str:
        value = self.files.get(self.realpath(path))
        if isinstance(value, int):
            raise failure(value, path)
        if value is None:
            raise failure(errno.EISDIR, path)
        return value

    def write(self, path: str, text: str) -> None:
        assert self.realpath(path) in self.files
        self.written.append((path, text))
        if path in self.stores:
            self.stores[path](text)

    def open(self, node: str, flags: int) -> Handle:
        self.log.append(f"open {node}")
        if number := self.open_errors.get(node):
            raise failure(number, node)
        handle = Handle(len(self.log) + 1000)
        self.opened[handle] = (node, flags)
        return handle

    def ioctl(self, handle: Handle, request: int, argument: bytes | int) -> int:
        node, _ = self.opened[handle]
        self.ioctls.append((node, request, argument))
        if request == defs.PORT_RESET:
            if self.reset_error:
                raise failure(self.reset_error)
            return 0
        assert request == defs.FME_PORT_PR
        assert isinstance(argument, bytes)
        argsz, flags, port, size, address = defs.PORT_PR.unpack(argument)
        assert (argsz, flags) == (24, 0)
        return self.pr(port, ctypes.string_at(address, size))

    def map(self, handle: Handle, length: int) -> "FakeRegisters":
        node, _ = self.opened[handle]
        if node not in self.registers:
            raise failure(errno.ENODEV, node)
        assert length % 4096 == 0
        self.log.append(f"map {node}")
        return FakeRegisters(self, node)

    def close(self, handle: Handle) -> None:
        node, _ = self.opened.pop(handle)
        self.log.append(f"close {node}")
        if self.close_error:
            raise failure(self.close_error)

    # What stands in the tree.

    def remove(self, path: str) -> None:
        """Take a directory or an attribute away, links in it too."""
        for names in (self.files, self.links):
            for name in [n for n in names if n == path or n.startswith(path + "/")]:
                del names[name]

    def add_function(self, address: str, *, driver: str = "dfl-pci") -> str:
        path = f"/sys/devices/pci0000:3a/{address}"
        self.files |= {
            f"{path}/vendor": "0x8086",
            f"{path}/device": "0x09c4",
            f"{path}/numa_node": "1",
            f"{path}/aer_dev_fatal": "Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 2",
            f"{path}/aer_dev_correctable": "RxErr 7\nTOTAL_ERR_COR 7",
        }
        self.files[f"/sys/bus/pci/drivers/{driver}/module"] = ""
        self.links[f"{path}/driver"] = f"/sys/bus/pci/drivers/{driver}"
        self.links[f"/sys/bus/pci/devices/{address}"] = path
        return path

    def add_port(self, parent: str, region: int, number: int, port_id: int) -> str:
        base = f"{parent}/fpga_region/region{region}"
        port = f"{base}/dfl-port.{number}"
        self.files |= {
            f"{port}/id": str(port_id),
            f"{port}/afu_id": AFU,
            f"{port}/power_state": "0x0",
            f"{port}/ap1_event": "0",
            f"{port}/ap2_event": "0",
            f"{port}/errors/errors": "0x0",
            "/sys/bus/platform/drivers/dfl-port/module": "",
        }
        self.links[f"{port}/driver"] = "/sys/bus/platform/drivers/dfl-port"
        self.links[f"/sys/class/fpga_region/region{region}"] = base
        return port

    def add_card(
        self, address: str = ADDRESS, *, ports: tuple[int, ...] = (0,), number: int = 0
    ) -> str:
        """A card whose port nodes count from `number`; returns the FME's directory."""
        parent = self.add_function(address)
        region = number * 10
        base = f"{parent}/fpga_region/region{region}"
        fme = f"{base}/dfl-fme.{number}"
        own = f"{fme}/dfl-fme-region.{number + 7}/fpga_region/region{region + 1}"
        manager = f"{fme}/dfl-fme-mgr.{number}/fpga_manager/fpga{number}"
        self.files |= {
            f"{base}/compat_id": errno.ENOENT,
            f"{fme}/ports_num": str(len(ports)),
            f"{fme}/bitstream_id": "0x23000110010309",
            f"{fme}/errors/catfatal_errors": "0x0",
            f"{fme}/errors/nonfatal_errors": "0x0",
            f"{fme}/hwmon/hwmon3/temp1_crit_alarm": "0",
            f"{fme}/hwmon/hwmon3/temp1_max_alarm": "0",
            f"{fme}/hwmon/hwmon4/power1_max_alarm": "0",
            f"{fme}/dfl_dev.5/inf0_init_done": "1",
            f"{fme}/dfl_dev.5/inf0_cal_fail": "0",
            f"{fme}/dfl_dev.5/inf0_clear": "",
            f"{manager}/state": "operating",
            f"{manager}/status": "",
            f"{own}/compat_id": INTERFACE,
        }
        self.links[f"/sys/class/fpga_region/region{region}"] = base
        self.links[f"/sys/class/fpga_region/region{region + 1}"] = own
        for index, port_id in enumerate(ports):
            self.add_port(parent, region, number + index, port_id)
        return fme

    def on_disk(self, root: Path) -> None:
        """The same tree as files and relative links, as sysfs has them; errnos are left out."""
        for path, text in self.files.items():
            if isinstance(text, str):
                file = root / path.removeprefix("/sys/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"{text}\n")
        for path, target in self.links.items():
            link = root / path.removeprefix("/sys/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(target, os.path.dirname(path)))


def served(kernel: FakeKernel) -> tuple[Backend, Card]:
    """The one card in a kernel, and the backend that found it."""
    backend: Backend = DflBackend(kernel)
    inventory = backend.scan()
    assert not inventory.problems
    (card,) = inventory.cards.values()
    return backend, card
