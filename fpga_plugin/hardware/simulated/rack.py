"""The simulated machine's cards as its kernel has them: plugged, unplugged, written down.

Reality is the directory: a card is there while its file is. Nothing here hears of changes; it
looks, whenever somebody follows a path into a card or lists all of them.
"""

import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fpga_plugin.hardware.simulated.board import Board, Machine
from fpga_plugin.hardware.simulated.faults import Faults
from fpga_plugin.hardware.simulated.functions import VfioDriver, is_ofs
from fpga_plugin.hardware.simulated.numbers import Numbers
from fpga_plugin.hardware.simulated.slots import CardFile, Slots
from fpga_plugin.hardware.simulated.state import MOST_FUNCTIONS, RegionState, StateFile
from fpga_plugin.hardware.simulated.topology import Topology
from fpga_plugin.hardware.simulated.tree import failure
from fpga_plugin.ids import CardId, RegionId, region_id
from fpga_plugin.settings.settings import SimulatedGroup


class Rack:
    """All plugged cards. The caller holds `lock` around every method.

    Args:
        directory: FPGA_PLUGIN_SIMULATED_DIR.
        groups: FPGA_PLUGIN_SIMULATED_CARDS.
        owner: may write.
        bind: takes what is written to dfl-pci's `bind`.
        unbind: the same for `unbind`.
        stop: for what the real kernel would not survive.

    Attributes:
        lock: covers all state; never held while anything waits.
        machine: what the cards share.
        boards: the plugged cards.
        slots: where they are plugged.
        vfio: the driver of virtual functions.
        topology: what sysfs shows of them.

    Raises:
        OSError: the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: str,
        groups: Sequence[SimulatedGroup],
        *,
        owner: bool,
        bind: Callable[[str], None],
        unbind: Callable[[str], None],
        stop: Callable[[str], None],
    ) -> None:
        self.lock = threading.RLock()
        self.machine = Machine(
            lock=self.lock,
            state=StateFile(directory),
            faults=Faults(directory),
            fmes=Numbers(),
            ports=Numbers(),
            regions=Numbers(),
        )
        self.boards: dict[CardId, Board] = {}
        self.slots = Slots(directory, groups, owner=owner)
        self.vfio = VfioDriver(lambda _: self._settled(), stop)
        self.topology = Topology(
            self.boards,
            look_at_all=self.look_at_all,
            look_at=self.guard,
            bind=bind,
            unbind=unbind,
            vfio=self.vfio,
        )
        self._owner = owner
        self._removed: set[CardId] = set()
        self._unsaved = True
        self._power_up()

    def note_removal(self, card: CardId) -> None:
        """A removal of the card's file was seen: what is there now may be another card.

        Needs no lock. It matters where the new file has got the old one's inode.
        """
        self._removed.add(card)

    def look(self, card: CardId) -> Board | None:
        """Make one card what its file says; None: it is not plugged."""
        self._look(card)
        self.settle()
        return self.boards.get(card)

    def look_at_all(self) -> None:
        """Make all cards what the files say."""
        plugged = self.slots.plugged()
        # Those that have gone come first: their numbers are free for those that have come.
        for card in (*(self.boards.keys() - plugged), *plugged):
            self._look(card)
        self.settle()

    def guard(self, board: Board) -> None:
        """Raise ENOENT if a card that a path leads through has gone."""
        self.look(board.card)
        if board.gone:
            raise failure(errno.ENOENT, str(board.address))

    def put(self, region: RegionId, state: RegionState) -> None:
        """Change a region; `settle` is then due."""
        self.machine.state.put(region, state)
        self._unsaved = True

    def changed(self) -> None:
        """Cards or drivers came or went; `settle` is then due."""
        self.topology.changed()
        self._unsaved = True

    def settle(self) -> None:
        """Write down what has changed, before anybody can see it."""
        if self._unsaved and self._owner:
            self.machine.state.save()
            self.slots.save()
        self._unsaved = False

    def _settled(self) -> None:
        with self.lock:
            self.changed()
            self.settle()

    def _power_up(self) -> None:
        """Start with what the files say: cards that stayed plugged kept their configuration."""
        saved = self.machine.state.load()
        found = [(card, self.slots.look(card)) for card in self.slots.plugged()]
        plugged = [(card, file) for card, file in found if file is not None]
        kept = {card for card, file in plugged if self._stayed(card, file, saved)}
        # Cards that keep their numbers come before those that take what is free.
        for card, file in sorted(plugged, key=lambda item: item[0] not in kept):
            self._plug(card, file, saved if card in kept else {})
        for card in self.slots.shapes.keys() - self.boards.keys():
            self.slots.remember(card, None)
        self.settle()

    def _stayed(self, card: CardId, file: CardFile, saved: Mapping[RegionId, RegionState]) -> bool:
        """Whether a card was there all the time while no daemon ran."""
        if self.slots.is_known(card) and self.slots.known(card) != file.inode:
            return False
        ports = range(self.slots.shape(card).regions)
        return any(region_id(card, port) in saved for port in ports)

    def _plug(self, card: CardId, file: CardFile, saved: Mapping[RegionId, RegionState]) -> None:
        board = Board(self.machine, card, self.slots.shape(card), file)
        states = {p: saved.get(board.region(p), RegionState()) for p in board.ports}
        if is_ofs(board) and states[0].functions is None:
            states[0] = replace(states[0], functions=("",) * MOST_FUNCTIONS)
        for port, state in states.items():
            self.put(board.region(port), state)
        if any(state.bound for state in states.values()):
            fme = next((s.fme for s in states.values() if s.fme is not None), None)
            nodes = {p: s.node for p, s in states.items() if s.node is not None}
            board.bind(fme=fme, nodes=nodes)
        self.boards[card] = board
        self.slots.remember(card, file.inode)
        self.changed()

    def _unplug(self, board: Board) -> None:
        del self.boards[board.card]
        board.unbind()
        board.gone = True
        for port in board.ports:
            self.machine.state.drop(board.region(port))
        self.slots.remember(board.card, None)
        self.changed()

    def _look(self, card: CardId) -> None:
        # Taken before the look: a removal during it is for the next one, which sees the new file.
        removed = card in self._removed
        self._removed.discard(card)
        file = self.slots.look(card)
        board = self.boards.get(card)
        if board is not None and (
            file is None
            or file.inode != board.file.inode
            or (removed and file.changed != board.file.changed)
        ):
            self._unplug(board)
            board = None
        if board is None and file is not None:
            self._plug(card, file, {})
