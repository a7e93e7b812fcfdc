"""Which files a running plugin reaches: the Landlock rules for its settings.

Rules cannot be added later. So they are on directories that stay while what lies in them comes and
goes: the store, kubelet's, /dev, the PCI host bridges below which cards are plugged. That is why
two of them are wider than what the plugin does. Any node in /dev can be opened, since a card that
is yet to come has no node (which drivers it may talk to is the system call filter's to say). And
the attributes of any PCI device can be written: not those of other devices, and nothing in
/proc/sys.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Final

import fpga_plugin
from fpga_plugin.host.locks import LOCK_DIRECTORY
from fpga_plugin.host.sandbox.landlock import DEVICES, OWN, READ, WRITE, Right
from fpga_plugin.settings.settings import BackendKind, RecoveryPolicy, ServedApi, Settings

_SYSTEM: Final = (
    "/usr",  # libraries, certificates, time zones
    "/lib",
    "/lib32",
    "/lib64",
    "/etc",  # resolv.conf, ld.so.cache, localtime
    "/proc",
    "/run/systemd/resolve",  # where resolv.conf is often a link to
    "/run/udev",  # libudev looks into its database
    "/sys/fs/cgroup",  # the process's own memory limit, in a pod beside the node's cgroups
    "/var/run/secrets",  # the service account
)
_KERNEL: Final = ("bus", "class", "devices", "kernel/iommu_groups", "module")
"""Of sysfs; libudev looks below /sys wherever the node's is mounted."""

_ALWAYS_READ: Final = ("/dev/urandom", "/dev/random", "/dev/zero")

_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)

_KUBELET_DIRECTORY: Final = READ | Right.MAKE_SOCK | Right.REMOVE_FILE
"""Sockets of ours come and go there. Kubelet's own files are not written, nor are new ones made."""


def rules(
    settings: Settings, *, rebinds: bool, claims: bool = False, cdi_dirs: Iterable[str] = ()
) -> tuple[dict[str, Right], list[str]]:
    """What is allowed beneath which path, and which paths of the settings cannot be reached.

    Args:
        settings: all of them.
        rebinds: a card's driver has to be bound although the settings do not ask for it.
        claims: ResourceClaims may have devices, whichever API serves.
        cdi_dirs: where their files are.
    """
    allowed: dict[str, Right] = {}
    unreached: list[str] = []

    def allow(paths: Iterable[str], right: Right) -> None:
        for path in paths:
            allowed[path] = allowed.get(path, Right(0)) | right

    allow(_SYSTEM, READ)
    allow(_python(), READ)
    allow((f"/sys/{name}" for name in _KERNEL), READ)
    allow(_ALWAYS_READ, READ)
    allow(("/dev/null",), READ | WRITE)
    for path in _read(settings):
        found = list(_lasting(path))
        allow(found, READ)
        if not found:
            unreached.append(path)
    # Names of pods that run, and nothing that they have there.
    allow(_lasting(os.path.join(settings.kubelet_root, "pods")), Right.READ_DIR)
    allow((settings.state_dir,), OWN)
    allow((os.path.join(settings.kubelet_dir, LOCK_DIRECTORY),), OWN)
    allow((settings.kubelet_dir, *registry(settings)), _KUBELET_DIRECTORY)
    allow(filter(os.path.isdir, cdi_dirs), OWN)
    if settings.mode is ServedApi.DRA:
        allow((settings.cdi_dir, os.path.join(_driver(settings), "metadata")), OWN)
    elif claims and os.path.isdir(settings.kubelet_root):
        # Kubelet replaces its record of claims by a rename: a rule for the file ends with it.
        allow((settings.kubelet_root,), READ)
    if settings.backend is BackendKind.SIMULATED:
        allow((settings.simulated_dir,), OWN)
        return allowed, unreached
    root = settings.sysfs_root
    allow((os.path.join(root, name) for name in _KERNEL), READ)
    if os.path.isdir(vfio := os.path.join(root, "bus/pci/drivers/vfio-pci")):
        allow((vfio,), WRITE)  # binds the functions of slots
    allow(_host_bridges(root), WRITE)
    allow((settings.dev_root,), DEVICES)
    if settings.recovery is RecoveryPolicy.REBIND or rebinds:
        # Not dfl-pci's directory alone: a module that is loaded again has another one.
        allow((os.path.join(root, "bus/pci/drivers"),), WRITE)
    return allowed, unreached


def registry(settings: Settings) -> Iterator[str]:
    """The directory of the sockets by which kubelet finds a DRA driver."""
    if settings.mode is ServedApi.DRA:
        yield _driver(settings)
        yield os.path.join(settings.kubelet_root, "plugins_registry")


def _driver(settings: Settings) -> str:
    """What is a DRA driver's own in kubelet's root directory."""
    return os.path.join(settings.kubelet_root, "plugins", settings.resource_prefix)


def _python() -> Iterator[str]:
    """Where modules are imported from, some of them later."""
    # `python -m` puts the working directory first, which may be any.
    yield from (path for path in sys.path if path not in {"", "/", _working_directory()})
    yield from {sys.prefix, sys.base_prefix, sys.exec_prefix} - {"/"}
    yield os.path.dirname(fpga_plugin.__file__)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody removed it
        return ""


def _read(settings: Settings) -> Iterator[str]:
    """What is read because a setting names it; files by their directory: they are replaced."""
    yield settings.bitstream_dir
    if settings.mode is ServedApi.DRA:
        # Kubelet's record of claims, which it replaces by a rename. No rule can leave out what lies
        # below: in the chart's pod that is hidden by empty volumes.
        yield settings.kubelet_root
    if settings.keys_dir is not None:
        yield settings.keys_dir
    if settings.policy_file is not None:
        yield os.path.dirname(settings.policy_file)
    if settings.cgroup_root is not None:
        yield settings.cgroup_root
    if settings.kubeconfig is not None:
        yield from _kubeconfig(settings.kubeconfig)


def _lasting(path: str) -> Iterator[str]:
    """Directories that let a path be read now, and if it is made or switched later.

    One that is not there yet is read by a rule on the nearest directory above it that is; where
    that is the root, by none. Of a path that leads over symbolic links, what stands beside its end
    is read, too: a link is switched to the next release, beside the last one.
    """
    real = os.path.realpath(path)
    found = real
    while not os.path.isdir(found):
        found = os.path.dirname(found)
    if real != os.path.abspath(path):
        found = os.path.dirname(found)
    if found != "/":
        yield found
    elif os.path.isdir(real):
        yield real


def _kubeconfig(path: str) -> Iterator[str]:
    """Its directory, and those of the files that it refers to."""
    import yaml  # 1.5 MiB, where there is a kubeconfig

    directory = os.path.dirname(path)
    yield directory
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return  # the first question to the API server reports what is wrong with it
    for named in sorted(set(_files_named(content))):
        yield os.path.dirname(os.path.join(directory, named))


def _files_named(content: object) -> Iterator[str]:
    """Of a kubeconfig (k8s.io/client-go/tools/clientcmd/api/v1, types.go)."""
    if isinstance(content, list):
        for one in content:
            yield from _files_named(one)
    elif isinstance(content, dict):
        for key, value in content.items():
            if key in {"certificate-authority", "client-certificate", "client-key", "tokenFile"}:
                if isinstance(value, str):
                    yield value
            else:
                yield from _files_named(value)


def _host_bridges(sysfs_root: str) -> Iterator[str]:
    """Directories of the PCI host bridges, which stay; every card is plugged below one."""
    seen: set[str] = set()
    for listed in ("class/pci_bus", "bus/pci/devices"):
        directory = os.path.join(sysfs_root, listed)
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(os.path.join(directory, name))
            except OSError:
                continue
            # ../../devices/pci0000:00/..., or on other machines ../../devices/platform/x/pci...
            _, devices, below = target.partition("/devices/")
            parts = below.split("/")
            for index, part in enumerate(parts):
                if devices and _HOST_BRIDGE.fullmatch(part):
                    seen.add(os.path.join(sysfs_root, "devices", *parts[: index + 1]))
                    break
    yield from sorted(seen)
