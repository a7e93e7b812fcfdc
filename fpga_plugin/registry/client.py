"""Reads an OCI registry: a manifest by tag or digest, and blobs by digest.

What comes is foreign: it is bounded in size and time, and its digest is computed here. Credentials
go to the host that they are for, and to the host that it names for tokens only if that is the same
one or the operator named it: who answers in a registry's place could ask for them otherwise. A
redirection of a blob gets none. Blocks; for commands, not for the daemon.

Facts: OCI distribution specification 1.1; the token protocol as the distribution project documents
it ("Token Authentication Specification").
"""

import hashlib
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

import httpx2
import msgspec

from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.registry.credentials import Credentials
from fpga_plugin.registry.reference import DIGEST, Reference

MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""What is understood, the rest to be told by what it is."""

MAX_MANIFEST_BYTES: Final = 4 << 20
"""What the distribution specification makes registries accept."""

_MAX_TOKEN_BYTES: Final = 1 << 20
_MAX_REDIRECTIONS: Final = 5
_PIECE: Final = 1 << 20
_STEP_SECONDS: Final = 30.0
"""For one step: to connect, to send, to get more bytes."""
_SLOWEST: Final = 64 << 10
"""Bytes a second: below it a blob takes too long, however steadily it drips."""

_CHALLENGE: Final = re.compile(r'([a-z]+)="([^"\\]{0,2048})"', re.ASCII)


class RegistryError(FpgaPluginError):
    """The registry cannot be reached, refuses, or does not hold what was asked for."""


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


_TOKEN: Final = msgspec.json.Decoder(_Token)


@dataclass(frozen=True, slots=True)
class Access:
    """How a registry is reached.

    Attributes:
        credentials: by host.
        realms: hosts that may see credentials of the registry, besides itself.
        ca_file: certificates of its authority; None: the system's.
        plain_http: without TLS; only for a registry on this machine or a network of its own.
    """

    credentials: Mapping[str, Credentials]
    realms: frozenset[str] = frozenset()
    ca_file: str | None = None
    plain_http: bool = False


class Registry:
    """One registry's repository. For one thread; close it (it is a context manager).

    Args:
        reference: of what is to be read.
        access: how.
        step_seconds: see `_STEP_SECONDS`.
    """

    def __init__(
        self, reference: Reference, access: Access, *, step_seconds: float = _STEP_SECONDS
    ) -> None:
        self._reference = reference
        self._access = access
        self._scheme = "http" if access.plain_http else "https"
        self._base = f"{self._scheme}://{reference.host}/v2/{reference.repository}"
        self._bearer = ""
        self._basic = False
        self._step = step_seconds
        try:
            verify = ssl.create_default_context(cafile=access.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise RegistryError(f"{access.ca_file}: no certificates can be read: {error}") from None
        # No environment: a proxy or netrc file that nobody meant would see what goes there.
        self._http = httpx2.Client(
            verify=verify, timeout=step_seconds, trust_env=False, follow_redirects=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def manifest(self) -> tuple[bytes, str]:
        """The manifest, and its digest as computed here.

        Raises:
            RegistryError: there is none, or not the one that the reference's digest names.
        """
        wanted = self._reference.wanted
        url = f"{self._base}/manifests/{wanted}"
        body = bytearray()
        with self._answer(url, what=str(self._reference), accept=", ".join(MANIFEST_TYPES)) as got:
            for piece in self._pieces(got, limit=MAX_MANIFEST_BYTES, what="its manifest"):
                body += piece
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if self._reference.digest not in {None, digest}:
            raise RegistryError(
                f"{self._reference}: the registry sent another manifest, {digest}",
                hint="somebody between here and the registry changes what it sends, or its disk is"
                " damaged",
            )
        return bytes(body), digest

    def blob(self, digest: str, size: int, write: Callable[[bytes], object]) -> None:
        """Fetch a blob; `write` gets its pieces. What it got counts only if this returns.

        Raises:
            RegistryError: it is not there, too slow, or not what digest and size say.
        """
        assert DIGEST.fullmatch(digest), "parsed where it was read"
        url, what = f"{self._base}/blobs/{digest}", f"blob {digest} of {self._reference}"
        computed, done = hashlib.sha256(), 0
        with self._answer(url, what=what) as got:
            for piece in self._pieces(got, limit=size, what=what):
                computed.update(piece)
                done += len(piece)
                write(piece)
        if done != size or f"sha256:{computed.hexdigest()}" != digest:
            raise RegistryError(
                f"{what}: what came ({done} bytes) is not what its manifest names ({size} bytes)",
                hint="try again; if it comes again so, the registry's copy is damaged",
            )

    @contextmanager
    def _answer(self, url: str, *, what: str, accept: str = "*/*") -> Iterator[httpx2.Response]:
        """The answer 200 to a GET, authorised where the registry asks for it."""
        for attempt in (1, 2):
            with self._get(url, accept, authorised=True) as response:
                if response.status_code == httpx2.codes.UNAUTHORIZED and attempt == 1:
                    self._authorise(response)
                    continue
                if response.is_redirect:
                    with self._redirected(response, accept, what) as other:
                        yield other
                    return
                self._check(response, what)
                yield response
                return

    @contextmanager
    def _redirected(
        self, response: httpx2.Response, accept: str, what: str
    ) -> Iterator[httpx2.Response]:
        url = response.url
        for _ in range(_MAX_REDIRECTIONS):
            try:
                url = url.join(response.headers.get("location", ""))
            except httpx2.InvalidURL as error:
                raise RegistryError(f"{what}: redirected to no address: {error}") from None
            if url.scheme != "https" and not (self._access.plain_http and url.scheme == "http"):
                raise RegistryError(f"{what}: redirected to {quote(url)}, which is not https")
            same = (url.scheme, url.netloc.decode()) == (self._scheme, self._reference.host)
            with self._get(str(url), accept, authorised=same) as answer:
                if answer.is_redirect:
                    url, response = answer.url, answer
                    continue
                self._check(answer, what)
                yield answer
                return
        raise RegistryError(f"{what}: redirected more than {_MAX_REDIRECTIONS} times")

    @contextmanager
    def _get(self, url: str, accept: str, *, authorised: bool) -> Iterator[httpx2.Response]:
        headers = {"Accept": accept, "Accept-Encoding": "identity", "User-Agent": "fpga-plugin"}
        auth: tuple[str, str] | None = None
        if authorised and self._bearer:
            headers["Authorization"] = f"Bearer {self._bearer}"
        elif authorised and self._basic and (known := self._credentials()):
            auth = (known.user, known.password)
        try:
            with self._http.stream("GET", url, headers=headers, auth=auth) as response:
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise RegistryError(
                f"{httpx2.URL(url).netloc.decode()}: {str(error) or type(error).__name__}",
                hint="check the name, the network and the certificates (--ca); --plain-http is for"
                " registries without TLS",
            ) from error

    def _check(self, response: httpx2.Response, what: str) -> None:
        status = response.status_code
        if status == httpx2.codes.OK:
            return
        if status in {httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN}:
            known = "was refused" if self._credentials() else "is not known here"
            raise RegistryError(
                f"{what}: the registry wants to know who asks, and {self._reference.host} {known}",
                hint="--auth names a file with user and password for this host",
            )
        if status == httpx2.codes.NOT_FOUND:
            raise RegistryError(f"{what}: not there", hint="check the repository and the digest")
        raise RegistryError(f"{what}: the registry answers {status}", hint="try again later")

    def _pieces(self, response: httpx2.Response, *, limit: int, what: str) -> Iterator[bytes]:
        end = time.monotonic() + self._step + limit / _SLOWEST
        done = 0
        for piece in response.iter_raw(_PIECE):
            done += len(piece)
            if done > limit:
                raise RegistryError(f"{what}: more than the {limit} bytes that it may have")
            if time.monotonic() > end:
                raise RegistryError(
                    f"{what}: only {done} bytes in {self._step + limit / _SLOWEST:.0f} s",
                    hint="try again when the registry or the network is faster",
                )
            yield piece

    def _credentials(self) -> Credentials | None:
        return self._access.credentials.get(self._reference.host)

    def _authorise(self, response: httpx2.Response) -> None:
        """Do what the registry asks for, as far as it may see what it asks for."""
        kind, _, rest = response.headers.get("www-authenticate", "").partition(" ")
        if kind.lower() == "basic":
            self._basic = True
            return
        asked = dict(_CHALLENGE.findall(rest))
        if kind.lower() != "bearer" or "realm" not in asked:
            raise RegistryError(
                f"{self._reference.host}: asks for {quote(kind)} authentication, which is not known"
            )
        self._bearer = self._token(asked)

    def _token(self, asked: Mapping[str, str]) -> str:
        realm, known = asked["realm"], self._credentials()
        try:
            url = httpx2.URL(
                realm, params={k: asked[k] for k in ("service", "scope") if k in asked}
            )
        except httpx2.InvalidURL as error:
            raise RegistryError(
                f"{self._reference.host}: its realm is no address: {error}"
            ) from None
        host = url.netloc.decode()
        if url.scheme not in {"https", self._scheme} or url.userinfo:
            raise RegistryError(f"{self._reference.host}: its realm {quote(realm)} is not https")
        auth: tuple[str, str] | None = None
        if known is not None:
            if host not in {self._reference.host, *self._access.realms}:
                raise RegistryError(
                    f"{self._reference.host}: sends whoever asks to {host} with his password",
                    hint=f"if that is the registry's own, say so: --realm {host}",
                )
            auth = (known.user, known.password)
        body = bytearray()
        try:
            with self._http.stream("GET", url, auth=auth) as response:
                self._check(response, f"a token from {host}")
                for piece in self._pieces(response, limit=_MAX_TOKEN_BYTES, what="a token"):
                    body += piece
            told = _TOKEN.decode(body)
        except (httpx2.HTTPError, ValueError, RecursionError) as error:
            raise RegistryError(f"{host}: gives no token: {type(error).__name__}") from error
        token = told.token or told.access_token
        if not token.isascii() or not token.isprintable() or not token:
            raise RegistryError(f"{host}: gives no token that can be used")
        return token
