"""The daemon confines itself: capabilities, Landlock, seccomp, each as far as the kernel lets it.

The plugin serves also without one of them: the log, the status and the metrics then say so, and the
others still apply.
"""

import os
from collections.abc import Iterable
from typing import Final

import structlog

import fpga_plugin
from fpga_plugin.daemon.file_rules import registry, rules
from fpga_plugin.host.sandbox import Measure, landlock, seccomp
from fpga_plugin.host.sandbox.capabilities import PrivilegesError, drop_privileges
from fpga_plugin.settings.settings import SandboxMode, Settings

log = structlog.get_logger()

_OFF: Final = "switched off (FPGA_PLUGIN_SANDBOX=off)"


def confine(
    settings: Settings,
    *,
    rebinds: bool = False,
    claims: bool = False,
    cdi_dirs: Iterable[str] = (),
) -> tuple[Measure, ...]:
    """Give up the rights that this process does not need; call it before the first thread starts.

    Args:
        settings: all of them.
        rebinds: a card's driver has to be bound although the settings do not ask for it.
        claims: ResourceClaims may have devices, whichever API serves.
        cdi_dirs: where their files are.

    Raises:
        RuntimeError: there are threads already.
    """
    measures = (
        _drop_capabilities(settings),
        _restrict_files(settings, rebinds=rebinds, claims=claims, cdi_dirs=cdi_dirs),
        _filter(settings),
    )
    said = {one.name: one.detail for one in measures}
    if all(one.holds for one in measures):
        log.info("the plugin is confined", **said)
    else:
        missing = [one.name for one in measures if not one.holds]
        log.warning("the plugin is not fully confined", missing=missing, **said)
    return measures


def _drop_capabilities(settings: Settings) -> Measure:
    """Root without its capabilities: what is opened later is root's, or else one is kept."""
    name = "capabilities"
    try:
        left = drop_privileges(
            # Of this package, and of those that it runs on, some modules are imported later.
            readable=[
                os.path.dirname(fpga_plugin.__file__),
                os.path.dirname(structlog.__file__),
                settings.bitstream_dir,
                *([] if settings.policy_file is None else [os.path.dirname(settings.policy_file)]),
            ],
            writable=[settings.state_dir, settings.kubelet_dir, *registry(settings)],
        )
    except PrivilegesError as error:
        log.warning("capabilities cannot be given up", error=error.message, hint=error.hint)
        return Measure(name, holds=False, detail=error.message)
    if left.foreign:
        log.info(
            "CAP_DAC_OVERRIDE is kept: some directories do not belong to root",
            directories=left.foreign,
        )
        return Measure(name, holds=True, detail="none left but CAP_DAC_OVERRIDE")
    return Measure(name, holds=True, detail="none left")


def _restrict_files(
    settings: Settings, *, rebinds: bool, claims: bool, cdi_dirs: Iterable[str]
) -> Measure:
    name = "landlock"
    if settings.sandbox is SandboxMode.OFF:
        return Measure(name, holds=False, detail=_OFF)
    allowed, unreached = rules(settings, rebinds=rebinds, claims=claims, cdi_dirs=cdi_dirs)
    try:
        restricted = landlock.restrict(allowed)
    except OSError as error:
        return Measure(name, holds=False, detail=_why(error))
    unreached += restricted.left_out
    if unreached:
        log.warning(
            "paths cannot be reached from inside the sandbox",
            paths=unreached,
            hint="restart the plugin once they are there, or set FPGA_PLUGIN_SANDBOX=off",
        )
    return Measure(name, holds=True, detail=f"ABI {restricted.abi}")


def _filter(settings: Settings) -> Measure:
    name = "seccomp"
    if settings.sandbox is SandboxMode.OFF:
        return Measure(name, holds=False, detail=_OFF)
    try:
        return Measure(name, holds=True, detail=seccomp.restrict())
    except OSError as error:
        return Measure(name, holds=False, detail=_why(error))


def _why(error: OSError) -> str:
    """A kernel without it, a boot parameter, or the profile of a container's runtime."""
    return f"the kernel or the container's runtime does not allow it: {error.strerror}"
