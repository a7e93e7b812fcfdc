"""Cards as the ledger knows them, without hardware behind them."""

from collections.abc import Iterable

from fpga_plugin.hardware.faults import Fault, FaultKind
from fpga_plugin.hardware.grant import Grant
from fpga_plugin.hardware.model import Card, Region
from fpga_plugin.ids import AfuId, DeviceId, InterfaceId, PciAddress
from fpga_plugin.kubernetes.names import ResourceName

PREFIX = "fpga.intel.com"
INTERFACE = InterfaceId("ce48969398f05f33946d560708be108a")
OTHER_INTERFACE = InterfaceId("0123456789abcdef0123456789abcdef")
BLANK = AfuId("b1a2" + "0" * 28)
AFU = AfuId("d8424dc4a4a3c413f89e433683f9040b")
REGIONS = ResourceName(f"{PREFIX}/region-{INTERFACE}")
WHOLE = ResourceName(f"{PREFIX}/fpga-{INTERFACE}")
TOO_HOT = Fault(FaultKind.TRANSIENT, "thermal: AP6")
POISONED = Fault(FaultKind.POISONED, "poisoned: held in reset")


def make_card(
    number: int = 1,
    *,
    nodes: Iterable[int | tuple[int, ...]] = (0, 1),
    ports: int | None = None,
    interface_id: InterfaceId = INTERFACE,
    numa_node: int | None = 0,
    clears_memory: bool = False,
    shared: tuple[str, ...] = (),
    reprogrammable: bool = True,
    major: int | None = None,
    fme: int | None = None,
) -> Card:
    """A card; `nodes` are the numbers of its regions' device nodes, one or several a region.

    With the driver's `major`, these are their device numbers, too; `fme` is that of the FME.
    """
    address = PciAddress(0, 0x10 + number, 0, 0)
    numbers = [(own,) if isinstance(own, int) else own for own in nodes]
    return Card(
        address=address,
        family="dfl",
        interface_id=interface_id,
        numa_node=numa_node,
        regions=tuple(
            Region(
                address.card_id,
                port,
                Grant(tuple(f"/dev/dfl-port.{n}" for n in own), shared),
                numbers={}
                if major is None
                else {f"/dev/dfl-port.{n}": f"{major}:{n}" for n in own},
            )
            for port, own in enumerate(numbers)
        ),
        ports=len(numbers) if ports is None else ports,
        clears_memory=clears_memory,
        reprogrammable=reprogrammable,
        guarded=frozenset() if fme is None else frozenset({f"{fme}:{number}"}),
    )


def device(card: Card, port: int | None = None) -> DeviceId:
    """A card's device id, or that of one of its regions."""
    if port is None:
        return DeviceId(card.id)
    return DeviceId(next(r.id for r in card.regions if r.port_id == port))
