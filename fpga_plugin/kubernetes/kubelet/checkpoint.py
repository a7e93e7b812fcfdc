"""Kubelet's own record of which pod holds which device: `kubelet_internal_checkpoint`.

It is the only local source that has the pods' uids and their init containers. It is also kubelet's
internal file: no version, and its shape has changed before. Readers that trusted it
broke; here a missing entry means that a tenant's region may be wiped. So the reader knows three
answers: the entries, "there is no file, hence no entries", and an error for everything that it does
not fully understand.

From pkg/kubelet/cm/devicemanager/checkpoint: kubelet replaces the file by rename, after each
admission that allocated something and after each device list that a plugin sends. Entries of dead
pods may stay in it, but never for a device that has been allocated again. `DeviceIDs` is a map from
NUMA node to ids. The checksum covers Go's rendering of Go structs and cannot be verified here; the
rename makes it unnecessary against torn writes.
"""

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from fpga_plugin.errors import NoSourceError
from fpga_plugin.kubernetes.names import (
    PodUid,
    ResourceName,
    parse_name,
    parse_pod_uid,
    parse_resource,
)

FILE_NAME: Final = "kubelet_internal_checkpoint"
"""In kubelet's device plugin directory."""

MAX_BYTES: Final = 32 * 1024 * 1024
"""A node of 500 pods with ten devices each stays below 3 MiB."""

_TRIES: Final = 3

Stamp: TypeAlias = tuple[int, int, int]
"""Inode, mtime in ns and size: another stamp, another write of the file."""


class CheckpointUnreadableError(NoSourceError):
    """The checkpoint is there, or should be, and cannot be understood: it says nothing."""


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """Devices of one resource that one container holds.

    Attributes:
        pod_uid: the pod; may be dead.
        container: the container; init containers are there too.
        resource: the resource, one that the caller serves.
        devices: ids as their plugin wrote them, which need not have been this one.
        response: kubelet's cached answer to Allocate, a serialised ContainerAllocateResponse, in
            base64; empty where the file has none.
    """

    pod_uid: PodUid
    container: str
    resource: ResourceName
    devices: frozenset[str]
    response: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the checkpoint says of our resources.

    Attributes:
        entries: who holds what.
        registered: the healthy devices of each resource that kubelet knows.
        stamp: reports whether the file was written again; None: there is no file.
        boot_id: the boot in which it was written; empty where kubelet does not say (most do not).
    """

    entries: tuple[CheckpointEntry, ...] = ()
    registered: Mapping[ResourceName, frozenset[str]] = field(default_factory=dict)
    stamp: Stamp | None = None
    boot_id: str = ""

    def holders(self, device: str) -> tuple[CheckpointEntry, ...]:
        """Every container that holds `device`; several of one pod where init containers do."""
        return tuple(entry for entry in self.entries if device in entry.devices)


class _Entry(msgspec.Struct):
    """`PodDevicesEntry`. Foreign entries' devices are left undecoded."""

    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: msgspec.Raw
    AllocResp: str | None = None


class _Data(msgspec.Struct):
    """`checkpointData`. The entries' key has to be there: without it the shape is another one."""

    PodDeviceEntries: list[_Entry] | None
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _File(msgspec.Struct):
    """The whole file."""

    Data: _Data
    BootID: str = ""


_Ids: TypeAlias = dict[str, list[str] | None] | None

# Made at import: msgspec 0.22 crashes where two threads are the first to decode a type.
_FILE: Final = msgspec.json.Decoder(_File)
_IDS: Final[msgspec.json.Decoder[_Ids]] = msgspec.json.Decoder(_Ids)


def read_checkpoint(path: str, ours: Callable[[str], bool]) -> Checkpoint:
    """Read the checkpoint at `path`; entries of `ours` only: which resources the caller serves.

    Blocks: call it in a thread.

    Raises:
        CheckpointUnreadableError: nothing can be said about who holds what.
    """
    raw, stamp = _read(path)
    if stamp is None:
        return Checkpoint()
    try:
        file = _FILE.decode(raw)
        entries = tuple(
            _entry(entry, ours)
            for entry in file.Data.PodDeviceEntries or ()
            if ours(entry.ResourceName)
        )
        registered = {
            parse_resource(resource, ours): frozenset(ids or ())
            for resource, ids in (file.Data.RegisteredDevices or {}).items()
            if ours(resource)
        }
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointUnreadableError(
            f"kubelet's checkpoint {path} is not understood ({error})",
            hint="this kubelet may be newer than the plugin: upgrade the plugin, or report this",
        ) from error
    return Checkpoint(entries, registered, stamp, file.BootID)


def read_stamp(path: str) -> Stamp | None:
    """The stamp that `read_checkpoint` would find, for one system call; None: there is no file.

    Raises:
        CheckpointUnreadableError: not even that can be said.
    """
    try:
        return _stamp(os.stat(path))
    except FileNotFoundError:
        _expect_directory(path)
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: str) -> tuple[bytes, Stamp | None]:
    """The whole file as one write left it, with its stamp."""
    for _ in range(_TRIES):
        try:
            # O_NONBLOCK: a pipe of this name must not hang the thread.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            _expect_directory(path)
            return b"", None
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            with open(descriptor, "rb") as file:
                before = os.fstat(descriptor)
                if not stat.S_ISREG(before.st_mode):
                    raise CheckpointUnreadableError(f"kubelet's checkpoint {path} is no file")
                raw = file.read(MAX_BYTES + 1)
                after = os.fstat(descriptor)
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(raw) > MAX_BYTES:
            raise CheckpointUnreadableError(
                f"kubelet's checkpoint {path} has more than {MAX_BYTES} bytes"
            )
        if _stamp(before) == _stamp(after) and len(raw) == after.st_size:
            return raw, _stamp(after)
    raise CheckpointUnreadableError(f"kubelet's checkpoint {path} changes while it is read")


def _entry(entry: _Entry, ours: Callable[[str], bool]) -> CheckpointEntry:
    ids: _Ids = _IDS.decode(entry.DeviceIDs)
    return CheckpointEntry(
        pod_uid=parse_pod_uid(entry.PodUID),
        container=parse_name(entry.ContainerName),
        resource=parse_resource(entry.ResourceName, ours),
        devices=frozenset(one for of_node in (ids or {}).values() for one in of_node or ()),
        response=entry.AllocResp or "",
    )


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _expect_directory(path: str) -> None:
    """No file means no entries only where kubelet's directory itself is there."""
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise CheckpointUnreadableError(
            f"kubelet's directory {directory} is not there",
            hint="mount it, and set FPGA_PLUGIN_KUBELET_DIR to where",
        )


def _unreadable(path: str, error: OSError) -> CheckpointUnreadableError:
    return CheckpointUnreadableError(
        f"kubelet's checkpoint {path} cannot be read ({error.strerror or error})",
        hint="the plugin has to run as root, with kubelet's directory mounted",
    )
