"""Calls to the API server for objects as JSON, and the lines of a watch.

lightkube reads the credentials, and nothing else of it is used: its client has no limit of an
answer's size, and its watch reconnects by itself, at once and with the token that it has, as often
as a server ends the stream, and waits for ever on a connection whose other end is gone. Every wait
here has an end.

A session reads the credentials when it begins, so that a token that was replaced is taken up by the
next session. lightkube is imported with the first one, 50 to 100 ms and 10 MiB.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from fpga_plugin.errors import FpgaPluginError, NoSourceError, quote

if TYPE_CHECKING:
    import httpx2

MAX_BODY: Final = 64 << 20
"""Bytes of an answer; the API server takes objects of at most 3 MiB, and lists come in pages."""

MAX_LINE: Final = 8 << 20
"""Bytes of a line of a watch: one object."""

MAX_RETRY_AFTER: Final = 60.0
"""Seconds; a server or proxy that asks for more does not get them."""

T = TypeVar("T")

_CALL_SECONDS: Final = 10.0
_ERROR_BYTES: Final = 256 << 10
"""Of a refusal: it has a line for each field of a slice's 128 devices, twice."""


class _Status(msgspec.Struct):
    """What the API server says of a refusal (meta/v1 Status)."""

    kind: str = ""
    reason: str = ""
    message: str = ""
    code: int = 0


_status = msgspec.json.Decoder(_Status)


class ApiServerError(NoSourceError):
    """The API server did not do what was asked.

    Attributes:
        why: the message without what was asked.
        code: HTTP status; 0: there was no answer.
        reason: the API server's own word for it (`NotFound`, `Conflict`, `Expired`); empty where
            a proxy or another server answered.
        said: the API server's own message as a whole, to look into, and for no log.
    """

    def __init__(
        self,
        why: str,
        *,
        asked: str = "",
        hint: str = "",
        code: int = 0,
        reason: str = "",
        retry_after: float = 0.0,
        said: str = "",
    ) -> None:
        super().__init__(f"{asked}: {why}" if asked else why, hint=hint)
        self.why = why
        self.code, self.reason, self.retry_after, self.said = code, reason, retry_after, said

    @property
    def not_found(self) -> bool:
        """Whether the API server itself says that there is none; a proxy's 404 has no reason."""
        return self.code == 404 and self.reason == "NotFound"  # noqa: PLR2004  # HTTP's number

    @property
    def gone(self) -> bool:
        """Whether the resource version that was named is no longer kept: list again."""
        return self.code == 410 or self.reason in {"Expired", "Gone"}  # noqa: PLR2004  # HTTP's number


def decoded(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, what: str) -> T:
    """What a server or a proxy sent.

    Args:
        decoder: of the type that it ought to be.
        raw: JSON, if it is what it ought to be.
        what: it is, for the message.

    Raises:
        ApiServerError: it is not understood.
    """
    try:
        return decoder.decode(raw)
    # Bytes that are no UTF-8 are a ValueError, and what is nested too deep a RecursionError.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiServerError(
            f"the API server's answer is not understood ({quote(error)})", asked=what
        ) from error


class Session:
    """A connection; from `session`. Calls may overlap."""

    def __init__(self, client: "httpx2.AsyncClient", *, seconds: float) -> None:
        self._client = client
        self._seconds = seconds

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        params: Mapping[str, str] | None = None,
        host: str = "",
        accept: str = "application/json",
        most: int | None = None,
    ) -> bytes:
        """One request; its answer, as JSON.

        Args:
            method: of HTTP.
            path: of the object or collection.
            body: what is sent, as JSON; with PATCH it is a merge patch (RFC 7396).
            params: of the question.
            host: the Host header, where somebody behind the API server reads it.
            accept: which form of JSON.
            most: bytes of an answer; None: `MAX_BODY`.

        Raises:
            ApiServerError: it was refused, or not answered in time.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Accept": accept}
        if host:
            headers["Host"] = host
        if content is not None:
            headers["Content-Type"] = (
                "application/merge-patch+json" if method == "PATCH" else "application/json"
            )
        what = f"{method} {path}"
        with _understood(what, self._seconds):
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream(
                    method, path, params=params, content=content, headers=headers
                ) as response,
            ):
                if response.is_error:
                    raise await _refusal(what, response)
                return await _body(what, response, MAX_BODY if most is None else most)

    async def lines(
        self, path: str, *, params: Mapping[str, str], silence: float
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a stream, until the server ends it.

        Args:
            path: of the collection.
            params: of the question.
            silence: after how many seconds without a byte the other end counts as dead.

        Raises:
            ApiServerError: it was refused, broke, or is dead.
        """
        import httpx2  # imported with the first session

        what = f"watch {path}"
        limits = httpx2.Timeout(self._seconds, read=silence)
        rest = b""
        with _understood(what, silence):
            async with self._client.stream(
                "GET", path, params=params, headers={"Accept": "application/json"}, timeout=limits
            ) as response:
                if response.is_error:
                    async with asyncio.timeout(self._seconds):
                        raise await _refusal(what, response)
                async for chunk in response.aiter_bytes():
                    *whole, rest = (rest + chunk).split(b"\n")
                    for line in whole:
                        if line.strip():
                            yield line
                    if len(rest) > MAX_LINE:
                        raise ApiServerError(f"a line of more than {MAX_LINE} bytes", asked=what)


@contextlib.asynccontextmanager
async def session(
    kubeconfig: str | None, *, seconds: float = _CALL_SECONDS
) -> AsyncIterator[Session]:
    """A connection to the API server.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        seconds: how long one call may take.

    Raises:
        CredentialsError: there are no credentials.
    """
    client = await asyncio.to_thread(_open, kubeconfig, seconds)
    try:
        yield Session(client, seconds=seconds)
    finally:
        await client.aclose()


def _open(kubeconfig: str | None, seconds: float) -> "httpx2.AsyncClient":
    from fpga_plugin.kubernetes.apiserver.connection import (
        connect,  # imports lightkube: only where needed
    )

    return connect(kubeconfig, seconds=seconds)


@contextlib.contextmanager
def _understood(what: str, seconds: float) -> Iterator[None]:
    """Every way in which a call can go wrong, as one error."""
    from httpx2 import HTTPError, InvalidURL, ReadTimeout  # imported with the first session
    from lightkube.core.exceptions import ConfigError

    from fpga_plugin.kubernetes.apiserver.connection import (
        reason,  # imports lightkube: only where needed
    )

    try:
        yield
    except (TimeoutError, ReadTimeout):
        raise ApiServerError(f"the API server said nothing for {seconds:g} s", asked=what) from None
    except PermissionError as error:
        raise ApiServerError(
            f"the program that the kubeconfig names for credentials cannot be run"
            f" ({error.strerror})",
            asked=what,
            hint="use a token or a certificate in its place, or set FPGA_PLUGIN_SANDBOX=off",
        ) from error
    except (HTTPError, InvalidURL, OSError, ConfigError) as error:
        raise ApiServerError(
            f"the API server cannot be asked ({reason(error)})", asked=what
        ) from None
    except FpgaPluginError:
        raise
    except Exception as error:  # of many types, for a token or a login that is not understood
        raise ApiServerError(
            f"the API server cannot be asked ({type(error).__name__}: the credentials may not be"
            " what they should be)",
            asked=what,
        ) from error


async def _body(what: str, response: "httpx2.Response", limit: int) -> bytes:
    parts, size = [], 0
    async for chunk in response.aiter_bytes():
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            raise ApiServerError(f"an answer of more than {limit} bytes", asked=what)
    return b"".join(parts)


async def _refusal(what: str, response: "httpx2.Response") -> ApiServerError:
    """What the server said, if it was the API server; a proxy's page has no reason."""
    code = response.status_code
    told = _Status()
    with contextlib.suppress(ApiServerError):
        told = decoded(_status, await _body(what, response, _ERROR_BYTES), what)
    if told.kind != "Status":
        told = _Status()
    said = f": {quote(told.message)}" if told.message else ""
    return ApiServerError(
        f"the API server answered {code}{said}",
        asked=what,
        code=code,
        reason=told.reason,
        retry_after=_retry_after(response.headers.get("Retry-After", "")),
        said=told.message,
    )


def _retry_after(text: str) -> float:
    """Seconds; a date, which HTTP also allows and the API server does not send, counts as none."""
    if not (text.isascii() and text.isdigit()):
        return 0.0
    return min(float(text[:6]), MAX_RETRY_AFTER)
