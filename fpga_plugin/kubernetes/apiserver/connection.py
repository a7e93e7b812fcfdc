"""A connection to the API server: credentials, and nothing from the environment.

lightkube is imported with this module, 50 to 100 ms and 9 MiB: import it only where it is needed,
and not on the event loop.
"""

import threading

import httpx2
from httpx2 import Timeout
from lightkube import KubeConfig
from lightkube.config import client_adapter

from fpga_plugin.errors import BitstreamError, NoSourceError, quote
from fpga_plugin.host.trusted_files import read_small

# lightkube has msgspec decode them, which crashes where two threads are the first to decode a type.
_one_at_a_time = threading.Lock()

_MAX_KUBECONFIG_BYTES = 1 << 20
_PART = 0.45
_LEAST_SECONDS = 1.0


class CredentialsError(NoSourceError):
    """There are no credentials for the API server, or they are not understood."""


def connect(kubeconfig: str | None, *, seconds: float) -> httpx2.AsyncClient:
    """A client. Blocks: it reads credentials, which are replaced now and then, and makes a context.

    Args:
        kubeconfig: path of a file with credentials; None: the pod's service account.
        seconds: how long one step of a call may take.

    Raises:
        CredentialsError: there are none, others may write them, or they are not understood.
    """
    # No proxy and no default certificates from the environment: the file says it all.
    given = client_adapter.ConnectionParams(timeout=_limits(seconds), trust_env=False)
    try:
        with _one_at_a_time:
            config = KubeConfig.from_service_account() if kubeconfig is None else _read(kubeconfig)
        single = config.get()
        assert single is not None, "without a default, lightkube raises"
        return client_adapter.AsyncClient(single, given)
    except BitstreamError as error:
        raise CredentialsError(f"the credentials cannot be used: {error}") from error
    except Exception as error:  # of many types, for files that are missing or malformed
        what = f"{type(error).__name__}: {quote(error)}"
        if kubeconfig is None:
            raise CredentialsError(
                f"no service account is mounted to ask the API server with ({what})"
            ) from error
        raise CredentialsError(
            f"the credentials in {kubeconfig} cannot be used ({what})"
        ) from error


def reason(error: Exception) -> str:
    """Why a call failed, for a message: no header of it, which may be the credentials."""
    name = type(error).__name__
    if isinstance(error, httpx2.LocalProtocolError):
        return f"{name}: the token may have a character, such as a line break, that none may have"
    return f"{name}: {quote(error)}"


def _limits(seconds: float) -> Timeout:
    """Of each step. The steps of connecting (TCP, then TLS) together end before a whole call does.

    httpcore closes a connection whose handshake it gave up itself, and leaves open, for as long as
    the other end is silent, one that was cancelled from outside (its backends' `start_tls` catch
    `Exception`, which a cancellation is not).
    """
    return Timeout(seconds, connect=max(_PART * seconds, _LEAST_SECONDS))


def _read(path: str) -> KubeConfig:
    """A file of credentials. Its writer decides what pods ask for, and what is run to log in.

    Raises:
        BitstreamError: others may write it.
        Exception: of many types.
    """
    import yaml

    data = read_small(path, inside=None, guarded=True, limit=_MAX_KUBECONFIG_BYTES)
    return KubeConfig.from_dict(yaml.safe_load(data), fname=path)
