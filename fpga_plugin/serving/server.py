"""grpclib's server that knows its connections, so that it can bound and close them.

grpclib's own shutdown does not do that: `close` leaves connections open, and on Python 3.12 and
later `wait_closed` waits until the client closes them, which kubelet does not.
"""

import asyncio
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

    async def close_all(self) -> None:
        """Stop listening, cancel the handlers, close every connection."""
        # asyncio loses a connection that it accepts in the turn of the loop in which its server is
        # closed: whoever dialled would wait for ever. So none is accepted first, and those that
        # were get their transports, within two turns.
        loop = asyncio.get_running_loop()
        if isinstance(self._server, asyncio.Server):
            for listening in self._server.sockets:
                loop.remove_reader(listening.fileno())
        for _ in range(2):
            await asyncio.sleep(0)
        self.close()
        self._connections.close()
        await asyncio.sleep(0)  # transports close their sockets on the loop's next turn
