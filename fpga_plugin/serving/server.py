"""grpclib's server that knows its connections, so that it can bound and close them.

grpclib's own shutdown does not do that: `close` leaves connections open, and on Python 3.12 and
later `wait_closed` waits until the client closes them, which kubelet does not.
"""

import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpclib.server import Server

from fpga_plugin.serving.codec import Codec
from fpga_plugin.serving.http2 import CONFIGURATION, CallHandler, CalmProtocol, Connections
from fpga_plugin.telemetry.instruments import Counter

if TYPE_CHECKING:
    from grpclib._typing import IServable


class ClosingServer(Server):
    """Serves on one socket.

    Uses names that grpclib (0.4) keeps to itself, `_protocol_factory` and what that one uses; it
    has no public way to a connection (its issues 107 and 148).

    Args:
        handlers: the services.
        dropped: connections that were closed for what they sent, by reason.
        codec: of the messages.
    """

    def __init__(
        self,
        handlers: "Sequence[IServable]",
        dropped: Counter | None = None,
        *,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(handlers, codec=codec or Codec(), config=CONFIGURATION)
        self._connections = Connections(dropped)

    def _protocol_factory(self) -> CalmProtocol:
        handler = CallHandler(
            self._mapping, self._codec, self._status_details_codec, self.__dispatch__
        )
        return CalmProtocol(handler, self._config, self._h2_config, self._connections)

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, which the caller closes if that fails."""
        try:
            await self.start(sock=listener)
        except BaseException:
            # asyncio may have begun to watch it, and would confuse the next socket of this number.
            asyncio.get_running_loop().remove_reader(listener.fileno())
            raise

    async def close_all(self) -> None:
        """Stop listening, cancel the handlers, close every connection.

        Whoever is told to end while it waits here is ended after that: a registration that failed
        closes its server, and the plugin may stop in these very turns.
        """
        # asyncio loses a connection that it accepts in the turn of the loop in which its server is
        # closed: whoever dialled would wait for ever. So none is accepted first, and those that
        # were get their transports, within two turns.
        loop = asyncio.get_running_loop()
        if isinstance(self._server, asyncio.Server):
            for listening in self._server.sockets:
                loop.remove_reader(listening.fileno())
        ends = [await _turn(), await _turn()]
        self.close()
        self._connections.close()
        ends.append(await _turn())  # transports close their sockets on the loop's next turn
        for cancelled in ends:
            if cancelled is not None:
                raise cancelled


async def _turn() -> asyncio.CancelledError | None:
    """One turn of the loop; returns what cancelled it."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError as cancelled:
        return cancelled
    return None
