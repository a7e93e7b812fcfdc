"""Calls that take one message and answer with one: received with limits, errors as statuses."""

from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream
from h2.exceptions import ProtocolError

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.kubernetes.grpc.server import receive

_log = structlog.get_logger()

WENT_AWAY = "the caller went away, or this endpoint ended"
"""Nobody hears such a call's answer. h2 raises its ProtocolError where a stream that has ended is
written to before its task was cancelled."""


def unary(
    method: str, request: type, reply: type, answer: Callable[[Any], Awaitable[Any]]
) -> Handler:
    """A method's handler, as grpclib expects it.

    Args:
        method: its name, for the log.
        request: type of what is received.
        reply: type of what is answered.
        answer: makes one of the other; an `FpgaPluginError` of it is answered as its status.
    """

    async def handler(stream: Stream[Any, Any]) -> None:
        with statuses(method):
            answered = await answer(await receive(stream))
            await stream.send_message(answered)

    return Handler(handler, Cardinality.UNARY_UNARY, request, reply)


class statuses:  # noqa: N801  # a context manager that is used as a statement
    """Turns errors of a call into statuses; the text of an unexpected one is only logged."""

    def __init__(self, method: str) -> None:
        self._method = method

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise what kubelet is sent.

        Raises:
            GRPCError: in place of the error.
        """
        if isinstance(error, FpgaPluginError):
            raise GRPCError(error.status, str(error.for_tenant())) from error
        if isinstance(error, ProtocolError):
            raise GRPCError(Status.CANCELLED, WENT_AWAY) from error
        if isinstance(error, Exception) and not isinstance(error, GRPCError):
            _log.error("unexpected error in a call", method=self._method, exc_info=error)
            raise GRPCError(
                Status.INTERNAL, f"{self._method} failed: see the log of fpga-plugin"
            ) from error
