"""Puts Events into the cluster, through the API server (events.k8s.io/v1).

It needs two rights: `create` and `patch` on `events` in the API group `events.k8s.io`. Credentials
are read again each time: tokens are replaced while the plugin runs.
"""

import asyncio
import secrets
from datetime import datetime

from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError, session
from fpga_plugin.kubernetes.events.broadcaster import Event, Subject

CALL_SECONDS = 5.0
"""An Event that takes longer is given up."""

CONTROLLER = "fpga.intel.com/fpga-plugin"
"""Who reports: a qualified name (k8s.io/api events/v1, reportingController)."""

_NODE_NAMESPACE = "default"  # where Events of objects without a namespace have to be
_MAX_NOTE = 1024  # bytes (k8s.io/api events/v1)
_MAX_NAME = 200
_FORBIDDEN = (401, 403)


class PostingError(FpgaPluginError):
    """The API server did not accept an Event."""


class ApiServerSink:
    """Talks to one API server.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        instance: which plugin reports: its node's name.
    """

    def __init__(self, kubeconfig: str | None, *, instance: str) -> None:
        self._kubeconfig = kubeconfig
        self._instance = instance or "unknown"

    async def create(self, event: Event, when: datetime) -> str:
        """Make it (`EventSink`)."""
        subject = event.subject
        name = f"{subject.name[:_MAX_NAME].rstrip('.-')}.{secrets.token_hex(8)}"
        regarding = {
            "apiVersion": "v1",
            "kind": subject.kind,
            "name": subject.name,
            "namespace": subject.namespace,
            "uid": subject.uid,
        }
        made = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "eventTime": _micro_time(when),
            "metadata": {"name": name, "namespace": _namespace(subject)},
            "regarding": {field: value for field, value in regarding.items() if value},
            "reason": event.reason,
            "action": event.action,
            "note": event.note.encode()[:_MAX_NOTE].decode(errors="ignore"),
            "type": "Warning" if event.warning else "Normal",
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
        }
        await self._send("POST", _collection(subject), made)
        return name

    async def again(self, event: Event, name: str, *, count: int, when: datetime) -> None:
        """Count it (`EventSink`)."""
        series = {"series": {"count": count, "lastObservedTime": _micro_time(when)}}
        await self._send("PATCH", f"{_collection(event.subject)}/{name}", series)

    async def _send(self, method: str, path: str, body: object) -> None:
        """One call.

        Raises:
            PostingError: the API server does not accept it; says why, without its name.
            CredentialsError: there are no credentials.
        """
        try:
            async with asyncio.timeout(CALL_SECONDS):
                async with session(self._kubeconfig, seconds=CALL_SECONDS) as server:
                    await server.call(method, path, body=body)
        except TimeoutError:
            raise PostingError(f"the API server did not answer within {CALL_SECONDS:g} s") from None
        except ApiServerError as error:
            raise PostingError(
                error.why,
                hint="the plugin's service account needs create and patch on events.k8s.io events"
                if error.code in _FORBIDDEN
                else error.hint,
            ) from error


def _collection(subject: Subject) -> str:
    return f"/apis/events.k8s.io/v1/namespaces/{_namespace(subject)}/events"


def _namespace(subject: Subject) -> str:
    return subject.namespace or _NODE_NAMESPACE


def _micro_time(when: datetime) -> str:
    """As MicroTime wants it: a fraction of six digits (k8s.io/apimachinery, meta/v1)."""
    return when.isoformat(timespec="microseconds")
