"""What tests do at a real API server: calls as anybody, and credentials in files."""

import json
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT = 120.0
"""Seconds for an answer, on a machine that has other work."""


class ApiCalls:
    """Of one server, which has a certificate that it made itself.

    Args:
        url: where it serves.
        folder: where it has its certificate (`--cert-dir`), and credentials are written.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    @property
    def certificate(self) -> Path:
        """The server's own, with the authority that signed it."""
        return self._folder / "apiserver.crt"

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        raw: bool = False,
        token: str = "admin",
        kind: str = "application/json",
    ) -> Any:
        """As the administrator, or as whoever has this token.

        Raises:
            OSError: it is not there, or refuses (HTTPError).
        """
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": kind},
        )
        context = ssl.create_default_context(cafile=self.certificate)
        with urllib.request.urlopen(request, timeout=LIMIT, context=context) as answer:
            text = answer.read()
        return text if raw else json.loads(text)

    def answers(self) -> bool:
        """Whether it is ready."""
        try:
            self.call("GET", "/readyz", raw=True)
            self.call("GET", "/api/v1/namespaces/default")
        except OSError:
            return False
        return True

    def kubeconfig(self, token: str = "admin", *, name: str = "") -> str:
        """Credentials of whoever has this token, in a file of this name, else of the token's."""
        path = self._folder / f"{name or token}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
            "current-context": "it",
        }
        new = path.with_suffix(".new")  # a program that begins may be reading it
        new.write_text(json.dumps(config))
        new.replace(path)
        return str(path)
