"""`faults/<region id>`: trouble that a test or a person arms, one word a file.

The files are read when they take effect, never watched for that: a fault is armed as soon as the
file is there. `pr-error`, `pr-stuck` and `afu-hung` are used up by one PR, which removes the file,
`port-fatal` and `pcie-error` by the clearing of their register; the others are in force while the
file is there.

| word | what the region shows |
|---|---|
| `pr-error` | the next PR ends with EIO and poisons the port |
| `pr-stuck` | the next PR ends with ETIMEDOUT after the driver's own 8 s and poisons the port |
| `port-deaf` | no reset is acknowledged: the next one ends with ETIMEDOUT and poisons the port |
| `fme-open` | exclusive opens of the card's FME fail with EBUSY, as when fpgad has it open |
| `port-open` | exclusive opens fail with EBUSY, as when a tenant has the port open |
| `afu-hung` | until the next PR `afu_id` reads all ones; port error bit 32 (MMIOTimedOut) is set |
| `afu-dead` | the same, whatever is programmed |
| `thermal` | port error bit 50 (Ap6Event) and power state 0x6; errors cannot be cleared (EBUSY) |
| `port-fatal` | port error bit 0 (TxCh0Overflow); PortFatalErr in the FME's `nonfatal_errors` |
| `pcie-error` | bit 0 of the FME's `pcie0_errors`; PcieError in its `nonfatal_errors` |
| `fatal` | every attribute of the port's registers reads all ones, as when the link is dead |

Alveo cards know `pr-error`, `pr-stuck`, `port-open`, `thermal` and `fatal` in the same sense, and
these:

| word | what the card shows |
|---|---|
| `bad-state` | `device_bad_state` is 1, also once the file is gone, until the card is reset |
| `firewall` | the same of a firewall that has tripped |
| `recovery` | it runs its golden image |
| `holder` | a process ignores SIGBUS: a reset does not go on while the file is there |
| `lost-answer` | PF0's answer to the next reset is lost: PF1 comes online by itself |
| `late-refresh` | the next load's record is emptied a moment later |
| `mute` | PF1 does not hear of another mask while the file is there |
| `minor-moves` | the next reset gives the render node another minor |
| `memory-stuck` | on-card memory keeps what it has, whatever is written |

All but `pcie-error` and `fme-open` are signals of the port, so that they fail the region that is
named and not its card. PRs run under `thermal` and `fatal`: the driver does not look
before it streams.
"""

import os
from contextlib import suppress
from enum import StrEnum

import structlog

from fpga_plugin.errors import quote
from fpga_plugin.ids import RegionId

_log = structlog.get_logger(__name__)

_LONGEST = 64


class SimulatedFault(StrEnum):
    """The words."""

    PR_ERROR = "pr-error"
    PR_STUCK = "pr-stuck"
    PORT_DEAF = "port-deaf"
    FME_OPEN = "fme-open"
    PORT_OPEN = "port-open"
    AFU_HUNG = "afu-hung"
    AFU_DEAD = "afu-dead"
    THERMAL = "thermal"
    FATAL = "fatal"
    PORT_FATAL = "port-fatal"
    PCIE_ERROR = "pcie-error"
    BAD_STATE = "bad-state"
    FIREWALL = "firewall"
    RECOVERY = "recovery"
    HOLDER = "holder"
    LOST_ANSWER = "lost-answer"
    LATE_REFRESH = "late-refresh"
    MUTE = "mute"
    MINOR_MOVES = "minor-moves"
    MEMORY_STUCK = "memory-stuck"


class Faults:
    """The folder of armed faults."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.join(directory, "faults")
        self._warned: set[tuple[RegionId, bytes]] = set()

    def armed(self, region: RegionId) -> SimulatedFault | None:
        """The fault in force for a region; any other word is ignored with a warning."""
        try:
            descriptor = os.open(os.path.join(self.directory, region), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            content = os.read(descriptor, _LONGEST)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        try:
            return SimulatedFault(content.decode("ascii").strip())
        except ValueError:
            self._warn(region, content)
            return None

    def use_up(self, region: RegionId) -> None:
        """Remove a fault that has had its effect."""
        with suppress(FileNotFoundError):  # removed by another process
            os.unlink(os.path.join(self.directory, region))

    def _warn(self, region: RegionId, content: bytes) -> None:
        # An empty file is one that is being written.
        if content.strip() and (region, content) not in self._warned:
            self._warned.add((region, content))
            _log.warning(
                "simulated-fault-ignored",
                region=region,
                word=quote(content.decode("ascii", "replace")),
                hint=f"one of {', '.join(SimulatedFault)}",
            )
