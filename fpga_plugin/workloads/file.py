"""The workloads file: what containers get beside their devices, by the last good version of it.

A wrong file never keeps devices from pods: they get what the version before said, or nothing more
than their devices. Unlike a policy's, a wrong first version is no reason not to start.
"""

import os

import structlog

from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.operator_files.followed import FollowedFile, Kind
from fpga_plugin.process.watcher import hint_for
from fpga_plugin.workloads.parse import WorkloadsError, parse_workloads
from fpga_plugin.workloads.paths import Guarded, check_node
from fpga_plugin.workloads.rules import Workload, Workloads

log = structlog.get_logger()


class WorkloadsFile(FollowedFile[Workloads]):
    """What is added now.

    Args:
        path: of the file; absolute.
        guarded: take no version that others may write.
        dev_root: where the node's device nodes are.
        paths: directories of the plugin and of kubelet.
    """

    def __init__(self, path: str, *, guarded: bool, dev_root: str, paths: Guarded) -> None:
        self._dev_root = dev_root

        def parse(raw: bytes, as_json: bool) -> Workloads:  # noqa: FBT001  # as `Kind` has it
            parsed = parse_workloads(raw, as_json=as_json, guarded=paths)
            for entry in parsed.entries:
                _check_links(entry, dev_root)
            return parsed

        kind = Kind(
            name="workloads file",
            setting="FPGA_PLUGIN_WORKLOADS",
            parse=parse,
            error=WorkloadsError,
            hint="mount it, or leave FPGA_PLUGIN_WORKLOADS empty to add nothing",
        )
        super().__init__(path, kind, guarded=guarded, otherwise=Workloads())

    def absent(self, entry: Workload) -> tuple[str, ...]:
        """Its device nodes that are not there: containers that should get them do not start."""
        return tuple(
            node for node in entry.extras.nodes if not os.path.exists(_at(node, self._dev_root))
        )

    def in_force(self) -> None:
        """Say that the file's present version is in force."""
        entries = self.content.entries
        log.info("workloads in force", file=self.path, workloads=[entry.name for entry in entries])
        absent = {entry.name: nodes for entry in entries if (nodes := self.absent(entry))}
        if absent:
            log.warning(
                "device nodes of a workload are not there",
                file=self.path,
                absent=absent,
                hint="containers that should get them do not start: load the driver, or remove"
                " them from the file",
            )

    def not_taken(self, error: FpgaPluginError) -> None:
        """Say that a new version is wrong, and the one before stays in force."""
        log.error(
            "the new workloads file is not taken; what was in force before stays in force",
            file=self.path,
            error=error.message,
            hint=error.hint,
            workloads=[entry.name for entry in self.content.entries],
        )

    def not_followed(self) -> None:
        """Say that the handled exception keeps the file from being followed."""
        log.exception("the workloads file cannot be followed", file=self.path)  # noqa: LOG004  # in a handler

    def unwatched(self, error: OSError) -> None:
        """Say that changes are not noticed (`process.watcher.Target`)."""
        log.warning(
            "the workloads file is not watched: a change may be seen late",
            file=self.path,
            error=str(error) if isinstance(error, TimeoutError) else error.strerror,
            hint=hint_for(error),
        )


def _check_links(entry: Workload, dev_root: str) -> None:
    """Whether its nodes, all links followed as a container's runtime does, may be given out.

    Raises:
        WorkloadsError: one may not.
    """
    for node in entry.extras.nodes:
        real = os.path.realpath(_at(node, dev_root))
        root = os.path.realpath(dev_root)
        if real.startswith(f"{root}/"):
            real = f"/dev/{real.removeprefix(root + '/')}"
        try:
            check_node(real)
        except ValueError as error:
            raise WorkloadsError(
                f"workload {entry.name}: devices: {node} is a link to {quote(real)}: {error}"
            ) from None


def _at(node: str, dev_root: str) -> str:
    return os.path.join(dev_root, node.removeprefix("/dev/"))
