"""A jar that keeps no cookie, in place of the 2.5 MiB by which httpx2 keeps them.

The API server sets none. One that a proxy before it sets is not sent back: kubectl and Kubernetes'
own clients send none back either. httpx2 imports the machinery for them nevertheless, with urllib's
client, http's, email, tempfile and two compressors.

Whoever binds one of these names while httpx2 is imported, in another thread too, has that of here
for good: a jar that keeps nothing. So nothing below fpga_plugin imports them (a test holds it).
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from fpga_plugin.process.stand_ins import StandIn


class _Request:
    """What httpx2 shows of a request to the jar."""

    def __init__(self, **_shown: object) -> None:
        pass


class _Jar:
    """What httpx2 takes for `http.cookiejar.CookieJar`; always empty."""

    def extract_cookies(self, _response: object, _request: object) -> None:
        """Keep what an answer sets: nothing."""

    def add_cookie_header(self, _request: object) -> None:
        """Send what was kept: nothing."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[object]:
        return iter(())


def _later(module: str, function: str) -> Any:
    """A function that has its module imported when it is called."""

    def call(*arguments: object) -> object:
        return getattr(import_module(module), function)(*arguments)

    return call


NO_COOKIES: Final = {
    "email.message": {},
    "http.cookiejar": {
        "CookieJar": _Jar,
        **dict.fromkeys(("Cookie", "CookiePolicy", "DefaultCookiePolicy"), object),
    },
    "urllib.request": {
        "Request": _Request,
        # Of digest authentication and of proxies in the environment: neither is asked for here.
        **{name: _later("urllib.request", name) for name in ("getproxies", "parse_http_list")},
    },
}
"""Names that are asked for at import, by module."""


def no_cookies() -> dict[str, StandIn]:
    """For `stand_ins.in_place`, while httpx2 is imported."""
    return {module: StandIn(module, names) for module, names in NO_COOKIES.items()}
