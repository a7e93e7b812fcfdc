"""The policy file: who may load what, by the operator's last good version of it."""

import structlog

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.host.followed import FollowedFile, FollowedKind, read_file
from fpga_plugin.host.watcher import hint_for
from fpga_plugin.policy.parse import PolicyError, parse_policy
from fpga_plugin.policy.rules import Policy

log = structlog.get_logger()

POLICY_FILE = FollowedKind(
    name="policy file",
    setting="FPGA_PLUGIN_POLICY_FILE",
    parse=lambda raw, as_json: parse_policy(raw, as_json=as_json),
    error=PolicyError,
    hint="mount it, or leave FPGA_PLUGIN_POLICY_FILE empty to do without a policy",
)


def read_policy(path: str, *, guarded: bool = False) -> Policy:
    """Read a policy file; JSON if its name ends so.

    Args:
        path: of the file.
        guarded: refuse one that others than root and this process's user may write.

    Raises:
        PolicyError: it cannot be read, or is wrong; the message names it.
    """
    return read_file(path, POLICY_FILE, guarded=guarded)[0]


class PolicyFile(FollowedFile[Policy]):
    """The policy in force.

    Args:
        path: of the file; absolute.
        guarded: take no version that others may write.

    Raises:
        PolicyError: the first version cannot be read, or is wrong.
    """

    def __init__(self, path: str, *, guarded: bool) -> None:
        super().__init__(path, POLICY_FILE, guarded=guarded)

    @property
    def policy(self) -> Policy:
        """What is in force now, as far as was looked."""
        return self.content

    def in_force(self) -> None:
        """Say that the file's present version is in force."""
        log.info(
            "policy in force",
            file=self.path,
            rules=len(self.content.rules),
            default=self.content.default.value,
        )

    def not_taken(self, error: FpgaPluginError) -> None:
        """Say that a new version is wrong, and the one before stays in force."""
        log.error(
            "the new policy is not taken; the one before stays in force",
            file=self.path,
            error=error.message,
            hint=error.hint,
            rules=len(self.content.rules),
        )

    def not_followed(self) -> None:
        """Say that the handled exception keeps the file from being followed."""
        log.exception("the policy file cannot be followed", file=self.path)  # noqa: LOG004  # in a handler

    def unwatched(self, error: OSError) -> None:
        """Say that changes are not noticed (`host.watcher.WatchTarget`)."""
        log.warning(
            "the policy file is not watched: a change is seen at the next PreStart",
            file=self.path,
            error=str(error) if isinstance(error, TimeoutError) else error.strerror,
            hint=hint_for(error),
        )
