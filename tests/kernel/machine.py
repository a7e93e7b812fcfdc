"""Boots the kernel in QEMU, without KVM, and runs one command in it on the host's files.

The guest's cards are ivshmem devices, each on a bus of its own from 0x10 on: 0000:10:00.0 to
0000:12:00.0, the addresses that simulated cards have. Two more, 0000:13:00.0 and 0000:14:00.0, play
functions of an OFS card. There are two NUMA nodes, and an IOMMU that translates.

Two others play functions that cannot be given away: 0000:15:00.0, whose IOMMU group has a stranger
in it, 0000:15:00.1 (a device of virtio's, which has a driver), and 0000:20:00.0, on a host bridge
that bypasses the IOMMU.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import initramfs
from modules import with_dependencies
from sources import CannotRunError, Sources

CARDS = 3
FUNCTIONS = 4
SHARED, OPEN = CARDS + 2, CARDS + 3
"""Functions that cannot be given away: the group's other member, and no IOMMU."""
NODES = 2
QEMU = "qemu-system-x86_64"
_SYSTEM = ["virtio_pci", "9pnet_virtio", "9p", "vfio-pci", "vfio_iommu_type1", "pci-stub"]
_COMMAND_LINE = (
    "console=ttyS0 loglevel=4 oops=panic panic=-1 mitigations=off intel_iommu=on"
    # Where the host is busy the kernel would find at its start that no timer works, and panic.
    " no_timer_check"
)
_INIT = Path(__file__).parent / "init.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What to boot.

    Attributes:
        sources: the kernel and its modules.
        card_modules: loaded once the host's files are there, in this order.
        clone: the repository, which the guest sees at the same path, read-only like all files.
        cache: where the initramfs may be written.
    """

    sources: Sources
    card_modules: list[Path]
    clone: Path
    cache: Path

    def run(self, script: str, *, limit: float) -> int:
        """Boot and run a script of bash's; the console goes to standard output.

        Args:
            script: runs in the clone's folder, as root, on the host's files.
            limit: seconds after which the machine is switched off.

        Raises:
            CannotRunError: there is no QEMU, or the machine did not get as far as the script.
        """
        if shutil.which(QEMU) is None:
            raise CannotRunError(f"{QEMU} is missing (make deps DEPS=kernel)")
        archive = self.cache / "initramfs"
        self._write(archive, script)
        process = subprocess.Popen(
            # As the builds of other tiers, also where we have this priority already.
            ["nice", "-n", str(max(0, 10 - os.nice(0))), QEMU, *self._options(archive)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        code = None
        try:
            code = self._follow(process, limit)
        finally:
            process.kill()
            process.wait()
        if code is None:
            raise CannotRunError("the machine ended before its command did: see above")
        return code

    def _follow(self, process: "subprocess.Popen[str]", limit: float) -> int | None:
        """Show the console until the guest is off; its exit code, None where it told none."""
        watchdog = threading.Timer(limit, process.kill)
        watchdog.start()
        code = None
        assert process.stdout is not None
        try:
            for line in process.stdout:
                text = line.rstrip("\r\n")
                if found := re.fullmatch(r"guest: exit code (\d+)", text):
                    code = int(found[1])
                    continue
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
        finally:
            watchdog.cancel()
        if process.wait() == -signal.SIGKILL:
            sys.stdout.write(f"switched off: not done after {limit:g} s\n")
        return code

    def _write(self, archive: Path, script: str) -> None:
        system = with_dependencies(self.sources, _SYSTEM)
        settings = (
            f"system_modules='{' '.join(path.name for path in system)}'\n"
            f"card_modules='{' '.join(path.name for path in self.card_modules)}'\n"
            f"clone='{self.clone}'\n"
        )
        files = {
            "bin/busybox": self.sources.busybox.read_bytes(),
            "init": _INIT.read_bytes(),
            "settings": settings.encode(),
            "run.sh": f"cd '{self.clone}'\n{script}\n".encode(),
        }
        for path in [*system, *self.card_modules]:
            files[f"modules/{path.name}"] = path.read_bytes()
        initramfs.write(archive, files)

    def _options(self, archive: Path) -> list[str]:
        options = [
            *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"),
            *("-m", "2048", "-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"),
            *("-kernel", str(self.sources.vmlinuz), "-initrd", str(archive)),
            # An oops ends the machine, and so the test; QEMU leaves instead of rebooting.
            *("-append", _COMMAND_LINE),
            # Before the devices that it translates for.
            *("-device", "intel-iommu,intremap=on,caching-mode=on"),
            *_share("root", Path("/")),
            *_share("clone", self.clone),
        ]
        for node in range(NODES):
            options += [
                *("-object", f"memory-backend-ram,id=ram{node},size={2048 // NODES}M"),
                *("-numa", f"node,nodeid={node},cpus={node},memdev=ram{node}"),
            ]
        options += ["-device", "pxb-pcie,id=cards,bus=pcie.0,bus_nr=15"]
        options += ["-device", "pxb-pcie,id=open,bus=pcie.0,bus_nr=31,bypass_iommu=on"]
        for card in range(CARDS + FUNCTIONS):
            size = 16 if card < CARDS else 1
            port = f"pcie-root-port,id=port{card},chassis={card + 1}"
            port += f",bus=cards,addr={card}" if card < OPEN else ",bus=open,addr=0"
            several = ",addr=0,multifunction=on" if card == SHARED else ""
            options += [
                *("-object", f"memory-backend-ram,id=card{card},size={size}M,share=on"),
                *("-device", port),
                *("-device", f"ivshmem-plain,memdev=card{card},bus=port{card}{several}"),
            ]
        options += ["-device", f"virtio-rng-pci,bus=port{SHARED},addr=0.1"]
        return options


def _share(tag: str, folder: Path) -> list[str]:
    options = f"local,id={tag},path={folder},security_model=none,readonly=on,multidevs=remap"
    return ["-fsdev", options, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
