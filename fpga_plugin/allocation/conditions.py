"""What work on a region does to the ledger: every step is written before it begins."""

from collections.abc import Iterable

from fpga_plugin.allocation.book import Book
from fpga_plugin.allocation.records import Change, Condition, RegionRecord
from fpga_plugin.ids import AfuId, CardId, RegionId


class Conditions(Book):
    """The ledger's steps on the side of scrubbing and programming."""

    def working(self, regions: Iterable[RegionId]) -> None:
        """The next step changes what is on these regions: until it is done, nothing is known."""
        self._set(regions, Condition.SCRUBBING, "")

    def dirty(self, regions: Iterable[RegionId], reason: str) -> None:
        """Somebody's image or state may be on them."""
        self._set(regions, Condition.DIRTY, reason)

    def faulted(self, region: RegionId, reason: str) -> None:
        """The region cannot be used until an operator, or a rebind, mends it."""
        self._set((region,), Condition.FAULTED, reason)

    def another_blank(self, card: CardId) -> None:
        """The blank bitstream was replaced: what failed only for the old one is worth a scrub."""
        present = self.cards.get(card)
        self.dirty(
            [
                region.id
                for region in (present.regions if present is not None else ())
                if self.record(region.id).condition is Condition.FAULTED
                and region.id not in self.failing
                and self.region_claim(region.id) is None
            ],
            "the blank bitstream was replaced",
        )

    def clean(self, region: RegionId, afu_id: AfuId | None, *, blank: bool) -> None:
        """Scrubbed: BLANK, or under best-effort UNBLANKED. Nobody of before counts any more."""
        self._set(
            (region,),
            Condition.BLANK if blank else Condition.UNBLANKED,
            "",
            afu_id=afu_id,
            forget=True,
        )

    def programmed(self, region: RegionId, afu_id: AfuId) -> None:
        """Scrubbed since its last owner, programmed, and verified."""
        self._set((region,), Condition.PROGRAMMED, "", afu_id=afu_id, forget=True)

    def _set(
        self,
        regions: Iterable[RegionId],
        condition: Condition,
        reason: str,
        *,
        afu_id: AfuId | None = None,
        forget: bool = False,
    ) -> None:
        change = Change()
        for region in regions:
            record = self.record(region)
            change.regions[region] = RegionRecord(
                region,
                condition,
                reason,
                afu_id,
                frozenset() if forget else record.former,
            )
        self._commit(change)

    def set_debt(self, card: CardId, *, open_: bool) -> None:
        """Whether on-card memory may still hold a former tenant's data."""
        if (card in self.debts) != open_:
            self._commit(Change(debts={card: open_}))
