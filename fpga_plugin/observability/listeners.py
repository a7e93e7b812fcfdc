"""Starts and ends the two HTTP listeners: the TCP address and the socket in the state directory.

They begin, and import what they need, a moment after the plugin's own start: registration does not
wait for them. If the address is taken, the plugin serves kubelet all the same, logs an error and
tries again.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import structlog

from fpga_plugin.host.backoff import Backoff
from fpga_plugin.host.ticks import tick
from fpga_plugin.observability import SOCKET
from fpga_plugin.observability.status_context import StatusContext

if TYPE_CHECKING:
    from fpga_plugin.observability.http import Handler, Listener
    from fpga_plugin.observability.routes import Routes

log = structlog.get_logger()

START_DELAY: Final = 0.3
"""Seconds after which the listeners begin: a start takes about half of it to register."""

FIRST_RETRY: Final = 1.0
LAST_RETRY: Final = 60.0
"""Seconds until an address that could not be had is tried again; doubles."""

RECHECK: Final = 30.0
"""Seconds between two looks whether the status socket is still there: the chart's probes ask over
it; readiness gives up after 40 s, liveness after a minute."""


class Listeners:
    """The two HTTP listeners.

    Args:
        context: what is shown.
        recheck: seconds between two looks whether the status socket is still there.
    """

    def __init__(self, context: StatusContext, *, recheck: float = RECHECK) -> None:
        self._context = context
        self._recheck = recheck
        self._locked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners: list[Listener] = []
        self.served: list[str] = []
        """The addresses on which metrics and page are served, as `host:port`; empty: not yet."""

    def start(self) -> None:
        """Begin, in a moment."""
        self._tasks = [
            asyncio.create_task(self._serve_local(), name="status socket"),
            asyncio.create_task(self._serve_public(), name="http"),
        ]

    def locked(self) -> None:
        """The state directory is ours: another plugin's socket there is left over."""
        self._locked.set()

    async def _serve_public(self) -> None:
        address = self._context.settings.http_address
        if address is None:
            return
        await asyncio.sleep(START_DELAY)
        listener = await self._retried(
            lambda routes: routes.public,
            lambda listener: listener.open_tcp(address.host, address.port),
            f"FPGA_PLUGIN_HTTP_ADDRESS={address.host}:{address.port}",
            hint="another process has the address, or it is not this node's: set"
            " FPGA_PLUGIN_HTTP_ADDRESS to another one, or to nothing to serve none",
        )
        self.served = listener.addresses
        log.info("serving metrics", addresses=listener.addresses)

    async def _serve_local(self) -> None:
        await self._locked.wait()
        await asyncio.sleep(START_DELAY)
        directory = self._context.settings.state_dir
        while True:
            listener = await self._retried(
                lambda routes: routes.local,
                lambda listener: listener.open_unix(directory, SOCKET),
                os.path.join(directory, SOCKET),
                hint="remove what is in its place: without the socket `fpga-plugin status`, `card`"
                " and the pod's probes fail",
            )
            while listener.in_place:  # nothing reports it
                await tick(self._recheck)
            log.warning(
                "the status socket was removed, and is created again", address=listener.addresses[0]
            )
            self._listeners.remove(listener)
            await listener.close()

    async def _retried(
        self,
        handler: "Callable[[Routes], Handler]",
        listen: "Callable[[Listener], Coroutine[Any, Any, None]]",
        where: str,
        *,
        hint: str,
    ) -> "Listener":
        from fpga_plugin.observability.connections import Connections
        from fpga_plugin.observability.http import (
            Listener,  # h11: 5 ms that no registration waits for
        )
        from fpga_plugin.observability.routes import Routes

        backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        connections = Connections(dropped=self._context.counters.http_dropped)
        listener = Listener(handler(Routes(self._context)), connections=connections)
        self._listeners.append(listener)  # closed with the others, whatever ends the attempts
        while True:
            try:
                await listen(listener)
            except OSError as error:
                delay = backoff.delay()
                log.error(  # noqa: TRY400  # no defect of ours: a traceback would tell nothing
                    "metrics and status are not served there; the plugin goes on without",
                    address=where,
                    error=error.strerror or str(error),
                    retry_in=round(delay, 3),
                    hint=hint,
                )
                await asyncio.sleep(delay)
            else:
                return listener

    async def close(self) -> None:
        """End both; requests that are being answered are broken off."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for listener in self._listeners:
            await listener.close()
