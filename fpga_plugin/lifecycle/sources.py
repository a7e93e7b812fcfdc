"""Where a container's environment comes from when kubelet does not send it."""

from collections.abc import Mapping
from typing import Protocol

from fpga_plugin.errors import NoSourceError
from fpga_plugin.lifecycle.identity import Identity


class EnvSource(Protocol):
    """Knows what a container asks for."""

    async def env(self, identity: Identity) -> Mapping[str, str]:
        """The environment of the container that starts now.

        Raises:
            NoSourceError: it cannot be told.
        """


class NoEnvSource:
    """There is none: only kubelets that send the environment can be served."""

    async def env(self, identity: Identity) -> Mapping[str, str]:
        """Refuse (`EnvSource`)."""
        pod = "" if identity.pod is None else f" of pod {identity.pod}"
        raise NoSourceError(
            f"kubelet sent no environment, so it is not known which bitstream the container{pod}"
            " asks for",
            hint="this version needs a kubelet that sends Env in PreStartContainer, as the KEP"
            " 'Resource configuration in device plugins upon container start' describes",
        )
