"""Blank bitstreams, by interface id; programming one removes a tenant's image.

A blank that is missing, unusable or not trusted is a state of its interface id, reported once and
looked at again when the store changes.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import structlog

from fpga_plugin.bitstreams.reader import StoreReader
from fpga_plugin.bitstreams.store import Bitstream
from fpga_plugin.errors import (
    FpgaPluginError,
    NotFinishedError,
    RefusedError,
    StoreUnavailableError,
)
from fpga_plugin.hardware.image import Xclbin
from fpga_plugin.hardware.model import Card
from fpga_plugin.ids import AfuId, InterfaceId
from fpga_plugin.settings.settings import ScrubPolicy

log = structlog.get_logger()

NO_BLANK = "no-blank-image"
"""The reason under which a region without a blank bitstream is kept back."""


VENDORS: Final = (
    "install the card vendor's null image: `fpga-plugin bitstream install --dir STORE --blank FILE`"
    " (docs/bitstreams.md)"
)
WITHOUT: Final = (
    "FPGA_PLUGIN_SCRUB=best-effort does without one, and hands over regions, reset, with the last"
    " pod's image still in them"
)
"""What to do about a blank bitstream that is missing: the one, or for target of it the other."""

_PASSING: Final = (NotFinishedError, StoreUnavailableError)
"""What the store says of a blank that may be there: a call that needs it may be tried again."""


class Blanks:
    """The store's blank bitstreams under the scrub policy."""

    def __init__(self, store: StoreReader, policy: ScrubPolicy) -> None:
        self._store = store
        self._policy = policy
        self._afus: dict[InterfaceId, AfuId | None] = {}
        self._problems: dict[InterfaceId, str] = {}
        self._reach: dict[AfuId, int] = {}

    async def load(self, card: Card) -> Bitstream | None:
        """The blank bitstream of a card; None only under best-effort.

        Under best-effort a store that does not answer has none.

        Raises:
            NotFinishedError: it is being written, and scrubbing is required.
            StoreUnavailableError: the store does not answer, and scrubbing is required.
            RefusedError: none can be used, and scrubbing is required.
        """
        interface_id = card.interface_id
        problem = ""
        passing: FpgaPluginError | None = None
        try:
            if (blank := await self._store.blank(interface_id, card.takes)) is None:
                expected = self._store.blank_path(interface_id, card.takes)
                problem = f"no blank bitstream at {expected}"
        except FpgaPluginError as error:
            blank, problem = None, str(error)
            passing = error if isinstance(error, _PASSING) else None
        self._afus[interface_id] = None if blank is None else blank.afu_id
        if blank is not None and isinstance(blank.image, Xclbin):
            self._reach[blank.afu_id] = blank.image.clearable
        if problem != self._problems.get(interface_id, ""):
            self._report(interface_id, problem)
        if blank is not None or self._policy is not ScrubPolicy.REQUIRED:
            return blank
        if passing is not None:
            raise type(passing)(f"{NO_BLANK}: {passing.message}", hint=passing.hint) from passing
        raise RefusedError(
            f"{NO_BLANK}: {problem}",
            hint=f"{VENDORS}; {WITHOUT}",
        )

    def _report(self, interface_id: InterfaceId, problem: str) -> None:
        self._problems[interface_id] = problem
        if problem:
            log.warning(
                "blank bitstream missing",
                interface_id=interface_id,
                reason=problem,
                policy=self._policy.value,
                hint=f"{VENDORS}; {WITHOUT}",
            )
        else:
            log.info("blank bitstream found", interface_id=interface_id)

    async def afu_id(self, card: Card) -> AfuId | None:
        """AFU id of a card's blank bitstream; None: there is none to use."""
        if card.interface_id not in self._afus:
            try:
                await self.load(card)
            except FpgaPluginError:
                return None
        return self._afus[card.interface_id]

    def exposed(self, card: Card, on_it: Iterable[AfuId | None], blank: AfuId | None) -> Card:
        """A card, with whether its memory stays that is cleared through its blank bitstream.

        It does not depend on what was cleared in this run of the plugin: whether it is clear is in
        the journal.

        Args:
            card: as its backend found it.
            on_it: AFU ids of its regions. If one is a blank bitstream's, that one cleared it.
            blank: of the store, which the next scrub programs.
        """
        if not card.memory:
            return card
        stores = 0 if blank is None else self._reach.get(blank, 0)
        reach = min(stores if one is None else self._reach.get(one, stores) for one in on_it)
        return replace(card, some_memory_stays=reach < card.memory)

    def problem(self, interface_id: InterfaceId) -> str:
        """Why there is no blank bitstream, by the last look; else empty."""
        return self._problems.get(interface_id, "")

    def missing(self, card: Card) -> bool:
        """Whether scrubs of a card wait for a blank, by the last look since the store changed."""
        of = card.interface_id
        return self._policy is ScrubPolicy.REQUIRED and of in self._afus and self._afus[of] is None

    def forget(self, interface_id: InterfaceId | None) -> None:
        """The store changed: look again next time; None: everywhere."""
        if interface_id is None:
            self._afus.clear()
        else:
            self._afus.pop(interface_id, None)
