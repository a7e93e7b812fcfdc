"""The simulated machine's Alveo cards, and what they show together.

They share the directory, its files and the lock with the cards of the DFL drivers.
"""

import errno
from collections.abc import Callable, Mapping

from fpga_plugin.hardware.simulated.alveo import layout
from fpga_plugin.hardware.simulated.alveo.board import FIRST_MINOR, AlveoBoard
from fpga_plugin.hardware.simulated.numbers import Numbers
from fpga_plugin.hardware.simulated.rack import Rack
from fpga_plugin.hardware.simulated.state import AlveoState
from fpga_plugin.hardware.simulated.tree import (
    Attribute,
    Directory,
    Fixed,
    Lazy,
    Node,
    Symlink,
    failure,
)
from fpga_plugin.ids import CardId, PciAddress
from fpga_plugin.settings.settings import SimulatedKind


class _Made:
    """A directory that is computed whenever somebody looks: there are few cards."""

    def __init__(self, build: Callable[[], Mapping[str, Node]]) -> None:
        self._build = build

    def names(self) -> list[str]:
        """What is in it."""
        return list(self._build())

    def child(self, name: str) -> Node | None:
        """One entry of it."""
        return self._build().get(name)


class AlveoRack:
    """All plugged Alveo cards. The caller holds the rack's lock around every method.

    Args:
        rack: of the DFL drivers' cards, which has the files.
        now: the clock.
        tell: is called with a card whose drivers or nodes came or went: the uevents.
        owner: may write.
    """

    def __init__(
        self,
        rack: Rack,
        *,
        now: Callable[[], float],
        tell: Callable[[CardId], None],
        owner: bool,
    ) -> None:
        self.boards: dict[CardId, AlveoBoard] = {}
        self._rack = rack
        self._now = now
        self._tell = tell
        self._owner = owner
        self._minors = Numbers()
        self._removed: set[CardId] = set()
        self.root: Directory = Fixed({"sys": self._sys()})
        self.look()
        for region, state in tuple(rack.machine.state.regions.items()):
            if isinstance(state, AlveoState) and all(
                board.region != region for board in self.boards.values()
            ):
                rack.machine.state.drop(region)  # it was unplugged while no daemon ran

    def note_removal(self, card: CardId) -> None:
        """As of the DFL drivers' rack."""
        self._removed.add(card)

    def look(self) -> None:
        """Make the cards what the files say, and do what is due."""
        slots = self._rack.slots
        plugged = [c for c in slots.plugged() if SimulatedKind.ALVEO in slots.shape(c).kinds]
        for card in [*(self.boards.keys() - plugged), *plugged]:
            self._look(card)
        for board in self.boards.values():
            board.settle()

    def _look(self, card: CardId) -> None:
        slots = self._rack.slots
        removed = card in self._removed
        self._removed.discard(card)
        file, board = slots.look(card), self.boards.get(card)
        if board is not None and (
            file is None
            or file.inode != board.file.inode
            or (removed and file.changed != board.file.changed)
        ):
            self._unplug(board)
            board = None
        if board is not None or file is None:
            return
        stayed = not slots.is_known(card) or slots.known(card) == file.inode
        machine = self._rack.machine
        board = AlveoBoard(
            machine,
            self._minors,
            card,
            slots.shape(card),
            file,
            self._now,
            self._changed,
            owner=self._owner,
        )
        self.boards[card] = board
        saved = machine.state.regions.get(board.region) if stayed else None
        board.power_up(saved if isinstance(saved, AlveoState) else AlveoState())
        slots.remember(card, file.inode)
        self._rack.changed()
        self._rack.settle()

    def _unplug(self, board: AlveoBoard) -> None:
        board.remove_node()
        del self.boards[board.card]
        board.gone = True
        self._rack.machine.state.drop(board.region)
        self._rack.slots.remember(board.card, None)
        self._rack.changed()
        self._rack.settle()

    def _changed(self, board: AlveoBoard) -> None:
        self._tell(board.card)

    def by_minor(self, minor: int) -> AlveoBoard | None:
        """The card whose render node has this minor."""
        if minor < FIRST_MINOR:
            return None
        return next((b for b in self.boards.values() if b.state.minor == minor), None)

    # ---------------------------------------------------------------- sysfs

    def _sys(self) -> Directory:
        drivers = Fixed(
            {
                "xclmgmt": _Made(lambda: self._driver(user=False)),
                "xocl": _Made(lambda: self._driver(user=True)),
            }
        )
        modules = {
            name: Fixed({"version": layout.VERSION})
            for name in (layout.MANAGEMENT_DRIVER[21:], layout.USER_DRIVER[21:])
        }
        return Fixed(
            {
                "bus": Fixed(
                    {"pci": Fixed({"devices": _Made(self._functions), "drivers": drivers})}
                ),
                "devices": _Made(self._roots),
                "module": Fixed(modules),
            }
        )

    def _functions(self) -> Mapping[str, Node]:
        found: dict[str, Node] = {}
        for board in self.boards.values():
            found[str(board.address)] = Symlink(layout.management_path(board))
            found[str(board.user_address)] = Symlink(layout.user_path(board))
        return found

    def _roots(self) -> Mapping[str, Node]:
        roots: dict[str, Node] = {}
        for board in self.boards.values():
            instance = board.file.changed << 1
            roots[layout.root_name(board)] = Fixed(
                {
                    str(board.address): Lazy(
                        lambda board=board: layout.management_entries(board),  # type: ignore[misc]  # bound now
                        instance=instance,
                    ),
                    str(board.user_address): Lazy(
                        lambda board=board: layout.user_entries(board),  # type: ignore[misc]  # bound now
                        instance=instance | 1,
                    ),
                }
            )
        return roots

    def _driver(self, *, user: bool) -> Mapping[str, Node]:
        def addressed(text: str) -> AlveoBoard:
            try:
                wanted = PciAddress.parse(text.strip())
            except ValueError:
                raise failure(errno.ENODEV) from None
            for board in self.boards.values():
                if wanted == (board.user_address if user else board.address):
                    return board
            raise failure(errno.ENODEV)

        return {
            "bind": Attribute(store=lambda text: addressed(text).bind(user=user)),
            "unbind": Attribute(store=lambda text: addressed(text).unbind(user=user)),
        }
