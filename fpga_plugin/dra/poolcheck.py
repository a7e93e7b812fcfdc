"""Whether ResourceSlices of others stand in this node's pool.

The scheduler follows the highest generation of a pool, whatever client wrote it. So any client that
may write ResourceSlices can keep pods from this node's devices. The admission policy of
`deploy/dra` stops the tokens of plugins on other nodes. It stops no other client, and a cluster may
lack it.

The watch of this node's own slices cannot show them: it selects by node, and the API server selects
by no pool. A watch of the whole driver would send each node what every other one writes. So the
driver's slices are listed now and then, as a Table without objects: about 150 bytes for a slice.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog

from fpga_plugin.dra.pool import COLLECTION, Pool
from fpga_plugin.errors import NoSourceError, quote
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, decoded, session

log = structlog.get_logger()

PAUSE_SECONDS: Final = 300.0
"""Between two lists, on average."""

TABLE: Final = "application/json;as=Table;g=meta.k8s.io;v=v1"
"""The media type of what `kubectl get` shows (meta/v1 Table)."""

_NAMED: Final = 3
"""So many slices a message names."""


class _Column(msgspec.Struct):
    name: str


class _Row(msgspec.Struct):
    cells: list[object]


class _Table(msgspec.Struct):
    columnDefinitions: list[_Column]  # noqa: N815  # the API's own name
    rows: list[_Row] | None = None


_table = msgspec.json.Decoder(_Table)


def pause() -> float:
    """Seconds until the next list; not the same on each node."""
    return PAUSE_SECONDS * random.uniform(0.5, 1.5)  # noqa: S311  # no secret


class PoolCheck:
    """Looks for ResourceSlices that others wrote into this node's pool.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        pool: this node's.
        warn: gets the message whenever it changes, but for the last, empty one.
        pause: how many seconds until the next list.

    Attributes:
        foreign: names of the slices of others in this pool, as last listed.
        problem: what that means, for people; empty while there are none.
    """

    def __init__(
        self,
        kubeconfig: str | None,
        pool: Pool,
        *,
        warn: Callable[[str], None],
        pause: Callable[[], float] = pause,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._pool = pool
        self._warn = warn
        self._pause = pause
        self.foreign: tuple[str, ...] = ()
        self.problem = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self._found(await self._list())
            except NoSourceError as error:
                # That the API server is away is in the log by the slices, which need it as well.
                log.debug("pool not checked", error=error.message)
            await asyncio.sleep(self._pause())

    async def _list(self) -> list[tuple[str, str]]:
        """Name and node of each foreign slice in the pool, by name.

        Raises:
            NoSourceError: the API server does not answer, or not with the columns of
                pkg/printers/internalversion of Kubernetes 1.34 and later.
        """
        params = {
            "fieldSelector": f"spec.driver={self._pool.driver}",
            "includeObject": "None",
            "resourceVersion": "0",  # from the API server's cache: it costs etcd nothing
        }
        async with session(self._kubeconfig) as server:
            body = await server.call("GET", COLLECTION, params=params, accept=TABLE)
        table = decoded(_table, body, COLLECTION)
        columns = [column.name for column in table.columnDefinitions]
        try:
            places = [columns.index(name) for name in ("Name", "Node", "Driver", "Pool")]
            rows = [[str(row.cells[place]) for place in places] for row in table.rows or ()]
        except (ValueError, IndexError) as error:
            raise ApiServerError(f"{COLLECTION}: no table of slices ({quote(error)})") from error
        mine, name = self._pool.driver, self._pool.node
        return sorted(
            (slice_name, node)
            for slice_name, node, driver, pool in rows
            if (driver, pool) == (mine, name) and node != name
        )

    def _found(self, foreign: Sequence[tuple[str, str]]) -> None:
        before, self.problem = self.problem, _problem(foreign)
        self.foreign = tuple(name for name, _ in foreign)
        if self.problem == before:
            return
        if not self.problem:
            log.info("the node's pool has no foreign ResourceSlices any more")
            return
        log.warning("foreign ResourceSlices in the node's pool", reason=self.problem)
        self._warn(self.problem)


def _problem(foreign: Sequence[tuple[str, str]]) -> str:
    if not foreign:
        return ""
    named = ", ".join(f"{quote(one)} of node {quote(node)}" for one, node in foreign[:_NAMED])
    more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
    return (
        f"ResourceSlices of others are in this node's pool: {named}{more}; the scheduler may give"
        " pods no device here, or one that is taken: delete them, and find out who wrote them"
    )
