"""What the settings name, opened: hardware, store, trust, policy.

For the daemon, and for commands that only look, which should not pay for importing a daemon.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from fpga_plugin.allocation.exposure import ExposurePolicy
from fpga_plugin.bitstreams.seen_manifests import SeenManifests
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.errors import BitstreamError, RefusedError, SettingsError
from fpga_plugin.hardware.backend import Backend, EventSource
from fpga_plugin.host.trusted_files import check_directory
from fpga_plugin.settings.settings import Advertise, BackendKind, ServedApi, Settings, defaults

if TYPE_CHECKING:
    from fpga_plugin.policy.file import PolicyFile


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Hardware:
    """A backend with the source of its events."""

    backend: Backend
    events: EventSource


def open_hardware(settings: Settings, *, owner: bool) -> Hardware:
    """The hardware that the settings name.

    Args:
        settings: all of them.
        owner: this process holds the plugin's locks; False: only look.

    Raises:
        FpgaPluginError: it cannot be used.
    """
    from fpga_plugin.hardware.dfl.slot_functions import SlotRule

    rule = SlotRule(dict(settings.slot_functions), settings.slot_identity or frozenset())
    if settings.backend is BackendKind.SIMULATED:
        from fpga_plugin.hardware.simulated.factory import (  # only where cards are simulated
            simulated_backend,
        )

        simulated = simulated_backend(
            settings.simulated_dir,
            settings.simulated_cards,
            pr_seconds=settings.simulated_pr_seconds,
            owner=owner,
            slots=_slots(settings),
            rule=rule,
            tenant_loads=settings.xrt_tenant_loads,
        )
        return Hardware(simulated.backend, simulated.events)
    from fpga_plugin.hardware.families import Families  # only where cards are real
    from fpga_plugin.hardware.linux import LinuxKernel
    from fpga_plugin.hardware.udev import UdevEvents

    kernel = LinuxKernel(settings.sysfs_root, settings.dev_root)
    families: list[Backend] = []
    if settings.backend in {BackendKind.AUTO, BackendKind.DFL}:
        from fpga_plugin.hardware.dfl.backend import DflBackend  # only where it is wanted

        families.append(DflBackend(kernel, rule=rule, slots=_slots(settings), owner=owner))
    if settings.backend in {BackendKind.AUTO, BackendKind.XRT}:
        from fpga_plugin.hardware.xrt.backend import XrtBackend  # the same

        families.append(XrtBackend(kernel, tenant_loads=settings.xrt_tenant_loads))
    backend = families[0] if len(families) == 1 else Families(families)
    return Hardware(backend, UdevEvents(settings.sysfs_root))


def _slots(settings: Settings) -> str:
    return os.path.join(settings.state_dir, "slots")


def exposure(settings: Settings) -> ExposurePolicy:
    """Who is given cards that expose memory, as the settings say."""
    return ExposurePolicy(settings.uncleared_memory, settings.untranslated_dma)


def names_interfaces(settings: Settings) -> bool:
    """Whether resources have aliases of interface ids: functions and ResourceSlices do not."""
    return (
        settings.interface_aliases
        and settings.mode is not ServedApi.DRA
        and settings.advertise is not Advertise.AF
    )


def names_shells(settings: Settings) -> bool:
    """Whether Alveo cards have the names that AMD's plugin gives them."""
    return (
        settings.xrt_shell_resources
        and settings.mode is not ServedApi.DRA
        and settings.advertise is not Advertise.AF
    )


def log_settings(settings: Settings) -> None:
    """Say once which settings are in force, and what is odd about the environment."""
    for warning in settings.warnings:
        log.warning(warning)
    log.info("settings in force", given=dict(settings.given))
    log.debug("settings by default", defaults=defaults(settings))


def check_state_dir(settings: Settings) -> None:
    """Whether the plugin can rely on what it finds in its state directory, if that is there.

    Raises:
        RefusedError: others may write there, or replace it: journal, copies and records are theirs.
    """
    if is_guarded(settings) and os.path.lexists(settings.state_dir):
        try:
            check_directory(settings.state_dir)
        except BitstreamError as error:
            raise RefusedError(
                f"FPGA_PLUGIN_STATE_DIR: {error.message}", hint=error.hint
            ) from error


def open_trust(settings: Settings, *, owner: bool) -> Trust:
    """What judges the store's files.

    Args:
        settings: all of them.
        owner: this process holds the plugin's locks and keeps its records; False: only look.
    """
    return Trust(
        settings.bitstream_dir,
        settings.trust,
        settings.keys_dir,
        guarded=is_guarded(settings),
        seen=SeenManifests(settings.state_dir, owner=owner),
    )


def open_policy(settings: Settings) -> "PolicyFile | None":
    """Who may load what, if the operator says so.

    Raises:
        SettingsError: the file cannot be read or is wrong. A plugin that never had a policy has
            none to fall back on, and to start without it would let everything through.
    """
    if settings.policy_file is None:
        return None
    from fpga_plugin.policy.file import PolicyFile  # imports YAML: 1.5 MiB
    from fpga_plugin.policy.parse import PolicyError

    try:
        return PolicyFile(settings.policy_file, guarded=is_guarded(settings))
    except PolicyError as error:
        raise SettingsError(f"FPGA_PLUGIN_POLICY_FILE: {error.message}", hint=error.hint) from error


def is_guarded(settings: Settings) -> bool:
    """Whether others may not write the store's files.

    For simulated cards they may: nothing runs there, and a clone's samples are often its user's.
    """
    return settings.backend is not BackendKind.SIMULATED
