"""Puts Events into the cluster, through the API server (events.k8s.io/v1).

It takes two rights: `create` and `patch` on `events` in the API group `events.k8s.io`. lightkube is
imported with this module, 50 to 100 ms and 10 MiB: import it only where Events are wanted, and not
on the event loop. Credentials are read anew each time: tokens are replaced while the plugin runs.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from datetime import datetime

from httpx2 import HTTPError, HTTPStatusError
from lightkube import AsyncClient
from lightkube.models.core_v1 import ObjectReference
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.events_v1 import Event as ApiEvent
from lightkube.types import PatchType

from fpga_plugin.api.server import CredentialsError, connect, reason
from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.telemetry.kube_events import Event, Subject

CALL_SECONDS = 5.0
"""An Event that takes longer is given up."""

CONTROLLER = "fpga.intel.com/fpga-plugin"
"""Who reports: a qualified name (k8s.io/api events/v1, reportingController)."""

_NODE_NAMESPACE = "default"  # where Events of objects without a namespace have to be
_MAX_NOTE = 1024  # bytes (k8s.io/api events/v1)
_MAX_NAME = 200
_FORBIDDEN = (401, 403)


class PostingError(FpgaPluginError):
    """The API server did not take an Event."""


class ApiServerSink:
    """Talks to one API server.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        instance: who reports, of all plugins: the node's name.
    """

    def __init__(self, kubeconfig: str | None, *, instance: str) -> None:
        self._kubeconfig = kubeconfig
        self._instance = instance or "unknown"

    async def create(self, event: Event, when: datetime) -> str:
        """Make it (`EventSink`)."""
        subject = event.subject
        name = f"{subject.name[:_MAX_NAME].rstrip('.-')}.{secrets.token_hex(8)}"
        made = ApiEvent(
            eventTime=_six_digits(when),
            metadata=ObjectMeta(name=name, namespace=_namespace(subject)),
            regarding=ObjectReference(
                apiVersion="v1",
                kind=subject.kind,
                name=subject.name,
                namespace=subject.namespace or None,
                uid=subject.uid or None,
            ),
            reason=event.reason,
            action=event.action,
            note=event.note.encode()[:_MAX_NOTE].decode(errors="ignore"),
            type="Warning" if event.warning else "Normal",
            reportingController=CONTROLLER,
            reportingInstance=self._instance,
        )
        await self._do(lambda client: client.create(made))
        return name

    async def again(self, event: Event, name: str, *, count: int, when: datetime) -> None:
        """Count it (`EventSink`)."""
        last = _six_digits(when).isoformat(timespec="microseconds")
        series = {"series": {"count": count, "lastObservedTime": last}}
        await self._do(
            lambda client: client.patch(
                ApiEvent,
                name,
                series,
                namespace=_namespace(event.subject),
                patch_type=PatchType.MERGE,
            )
        )

    async def _do(self, call: Callable[[AsyncClient], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                client = await asyncio.to_thread(connect, self._kubeconfig, seconds=CALL_SECONDS)
                try:
                    await call(client)
                finally:
                    await client.close()
        except CredentialsError as error:
            raise PostingError(error.message, hint=error.hint) from error
        except TimeoutError:
            raise PostingError(f"the API server did not answer within {CALL_SECONDS:g} s") from None
        except HTTPStatusError as error:
            code = error.response.status_code
            raise PostingError(
                f"the API server answered {code} {quote(error)}",
                hint="the plugin's service account needs create and patch on events.k8s.io events"
                if code in _FORBIDDEN
                else "",
            ) from error
        except HTTPError as error:
            raise PostingError(f"the API server cannot be reached ({reason(error)})") from None


def _namespace(subject: Subject) -> str:
    return subject.namespace or _NODE_NAMESPACE


def _six_digits(when: datetime) -> datetime:
    """MicroTime wants a fraction of six digits, and a full second is written without any."""
    return when.replace(microsecond=when.microsecond or 1)
