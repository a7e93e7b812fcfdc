"""Kubelet's own record of claims that are prepared: `dra_manager_state` in its root directory.

It reports which pods use a claim, which no call does after the first (pkg/kubelet/cm/dra/state). It
is internal to kubelet and may be wiped or lost with the node's disk: a hint that a pod may still
have a device, never the proof that none has. The reader knows three answers, as that of the
device plugins' checkpoint does: the claims, "there is no file", and an error for what it does not
understand.
"""

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from fpga_plugin.errors import NoSourceError
from fpga_plugin.kubernetes.names import (
    ClaimUid,
    PodUid,
    parse_claim_uid,
    parse_name,
    parse_pod_uid,
)

FILE_NAME: Final = "dra_manager_state"

MAX_BYTES: Final = 32 << 20
"""A node of 500 pods with ten claims each stays below 4 MiB."""


class RecordUnreadableError(NoSourceError):
    """The record is there, or should be, and cannot be understood: it says nothing."""


@dataclass(frozen=True, slots=True)
class RecordedClaim:
    """A claim that kubelet has prepared, or was about to.

    Attributes:
        uid: of the claim.
        namespace: of the claim.
        name: of the claim.
        pods: that use it on this node.
        driver: whose devices they are.
        devices: of that driver: names in its pool, with the requests that they are for.
    """

    uid: ClaimUid
    namespace: str
    name: str
    pods: frozenset[PodUid]
    driver: str
    devices: Mapping[str, tuple[str, ...]] = field(hash=False)


class _Device(msgspec.Struct):
    DeviceName: str
    RequestNames: list[str] | None = None


class _Driver(msgspec.Struct):
    Devices: list[_Device] | None = None


_Pods: TypeAlias = dict[str, object] | list[str] | None
"""A set of Go's is written as an object with empty values."""


class _Claim(msgspec.Struct):
    ClaimUID: str
    ClaimName: str
    Namespace: str
    PodUIDs: _Pods = None
    DriverState: dict[str, _Driver | None] | None = None


class _Data(msgspec.Struct):
    """The claims' key has to be there: without it the shape is another one."""

    ClaimInfoStateList: list[_Claim] | None


class _File(msgspec.Struct):
    Data: str


# Made at import: see kubernetes/kubelet/checkpoint.py.
_FILE: Final = msgspec.json.Decoder(_File)
_DATA: Final = msgspec.json.Decoder(_Data)


Ours: TypeAlias = Callable[[str, frozenset[str]], bool]
"""Whether devices that a claim has of a driver are this plugin's: the driver's name may be that of
an earlier setting."""


def read_record(root: str, ours: Ours) -> Mapping[ClaimUid, RecordedClaim]:
    """The claims that have devices of this plugin, or are about to get some.

    Blocks: call it in a thread.

    Args:
        root: kubelet's root directory.
        ours: by the driver's name and the devices.

    Raises:
        RecordUnreadableError: the users of the devices are unknown.
    """
    path = os.path.join(root, FILE_NAME)
    raw = _read(path)
    if raw is None:
        return {}
    try:
        claims = _DATA.decode(_FILE.decode(raw).Data).ClaimInfoStateList or ()
        found = [
            _claim(one, driver, devices)
            for one in claims
            for driver, devices in _drivers(one)
            if ours(driver, frozenset(devices))
        ]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordUnreadableError(
            f"kubelet's record {path} is not understood ({error})",
            hint="this kubelet may be newer than the plugin: upgrade the plugin, or report this",
        ) from error
    return {one.uid: one for one in found}


def _drivers(claim: _Claim) -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    """The drivers whose devices a claim has, with each device's requests."""
    for driver, state in (claim.DriverState or {}).items():
        devices = (state.Devices if state is not None else None) or ()
        yield driver, {one.DeviceName: tuple(one.RequestNames or ()) for one in devices}


def _claim(claim: _Claim, driver: str, devices: Mapping[str, tuple[str, ...]]) -> RecordedClaim:
    return RecordedClaim(
        uid=parse_claim_uid(claim.ClaimUID),
        namespace=parse_name(claim.Namespace),
        name=parse_name(claim.ClaimName),
        pods=frozenset(map(parse_pod_uid, claim.PodUIDs or ())),
        driver=driver,
        devices=devices,
    )


def _read(path: str) -> bytes | None:
    """The whole file; kubelet replaces it by rename."""
    try:
        # O_NONBLOCK: a pipe of this name must not hang the thread.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RecordUnreadableError(f"kubelet's record {path} is no file")
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(raw) > MAX_BYTES:
        raise RecordUnreadableError(f"kubelet's record {path} has more than {MAX_BYTES} bytes")
    return raw


def _unreadable(path: str, error: OSError) -> RecordUnreadableError:
    return RecordUnreadableError(
        f"kubelet's record {path} cannot be read ({error.strerror or error})",
        hint="the plugin has to run as root, with kubelet's root directory mounted",
    )
