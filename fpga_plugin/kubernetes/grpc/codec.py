"""Messages from untrusted bytes."""

from typing import Any

from grpclib.encoding.proto import ProtoCodec

from fpga_plugin.errors import InvalidRequestError
from fpga_plugin.kubernetes.grpc.wire import well_typed


class Codec(ProtoCodec):
    """grpclib's codec, whose messages have the types of their definitions."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The message in `data`.

        Raises:
            InvalidRequestError: there is none. betterproto2 raises half a dozen kinds of errors.
        """
        try:
            message = super().decode(data, message_type)
        except Exception as error:
            raise InvalidRequestError(
                f"the request is no {message_type.__name__}: {type(error).__name__}"
            ) from error
        if not well_typed(message):
            raise InvalidRequestError(
                f"the request is no {message_type.__name__}: a field of it is of another type"
            )
        return message
