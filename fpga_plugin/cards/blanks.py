"""Blank bitstreams, by interface id: what deprograms a region.

A blank that is missing, unusable or not trusted is a state of its interface id, reported once and
taken up again when the store changes.
"""

from typing import Protocol

import structlog

from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.errors import (
    BitstreamError,
    NotFinishedError,
    NotPermittedError,
    RefusedError,
    StoreUnavailableError,
)
from fpga_plugin.ids import AfuId, InterfaceId
from fpga_plugin.settings.settings import ScrubPolicy

log = structlog.get_logger()

NO_BLANK = "no-blank-image"
"""The reason under which a region without a blank bitstream is kept back."""


class BlankSource(Protocol):
    """What blank bitstreams come from (`StoreReader`)."""

    async def blank(self, interface_id: InterfaceId) -> Bitstream | None:
        """The blank bitstream of an interface id; None when there is none."""

    def blank_path(self, interface_id: InterfaceId) -> str:
        """Where it is expected."""


class Blanks:
    """The store's blank bitstreams under the scrub policy."""

    def __init__(self, store: BlankSource, policy: ScrubPolicy) -> None:
        self._store = store
        self._policy = policy
        self._afus: dict[InterfaceId, AfuId | None] = {}
        self._problems: dict[InterfaceId, str] = {}

    async def load(self, interface_id: InterfaceId) -> Bitstream | None:
        """The blank bitstream; None only under best-effort.

        Raises:
            RefusedError: none can be used, and scrubbing is required.
        """
        problem = ""
        blank: Bitstream | None = None
        try:
            blank = await self._store.blank(interface_id)
        except (
            BitstreamError,
            NotPermittedError,
            NotFinishedError,
            StoreUnavailableError,
        ) as error:
            problem = str(error)
        if blank is None and not problem:
            problem = f"no blank bitstream at {self._store.blank_path(interface_id)}"
        self._afus[interface_id] = None if blank is None else blank.afu_id
        if problem != self._problems.get(interface_id, ""):
            self._report(interface_id, problem)
        if blank is None and self._policy is ScrubPolicy.REQUIRED:
            raise RefusedError(
                f"{NO_BLANK}: {problem}",
                hint="install the card vendor's blank bitstream there, or set"
                " FPGA_PLUGIN_SCRUB=best-effort to do without",
            )
        return blank

    def _report(self, interface_id: InterfaceId, problem: str) -> None:
        if problem:
            self._problems[interface_id] = problem
            log.warning(
                "blank bitstream missing",
                interface_id=interface_id,
                reason=problem,
                policy=self._policy.value,
                hint=f"expected at {self._store.blank_path(interface_id)};"
                " FPGA_PLUGIN_SCRUB=best-effort works without it",
            )
        else:
            self._problems.pop(interface_id, None)
            log.info("blank bitstream found", interface_id=interface_id)

    async def afu_id(self, interface_id: InterfaceId) -> AfuId | None:
        """AFU id of the blank bitstream; None where there is none to use."""
        if interface_id not in self._afus:
            try:
                await self.load(interface_id)
            except RefusedError:
                return None
        return self._afus[interface_id]

    def problem(self, interface_id: InterfaceId) -> str:
        """Why there is no blank bitstream, as far as it was looked for; else empty."""
        return self._problems.get(interface_id, "")

    def forget(self, interface_id: InterfaceId | None) -> None:
        """The store changed: look again next time; None: everywhere."""
        if interface_id is None:
            self._afus.clear()
        else:
            self._afus.pop(interface_id, None)
