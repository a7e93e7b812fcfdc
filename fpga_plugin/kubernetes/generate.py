"""Make the checked-in messages from the .proto files: `python -m fpga_plugin.kubernetes.generate`.

Needs the development dependencies. protoc comes with grpcio-tools; it runs the betterproto2 plugin,
which formats what it wrote with the `ruff` that it finds in PATH, so the interpreter's own folder
goes first there. A test compares what is checked in with what this makes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROTOS = (
    "deviceplugin.proto",
    "podresources.proto",
    "pods.proto",
    "core_v1.proto",
    "pluginregistration.proto",
    "dra.proto",
    "dra_health_v1.proto",
    "dra_health_v1alpha1.proto",
)
"""They share no messages. Two of a package become one module."""

_HERE = Path(__file__).parent
_OPTIONS = "client_generation=async,server_generation=async"


def generate(target: Path) -> None:
    """Write one package for each .proto file below `target`, and the pool that they share.

    Raises:
        subprocess.CalledProcessError: protoc failed; it says why on standard error.
    """
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    target.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={_HERE}",
        f"--python_betterproto2_out={target}",
        f"--python_betterproto2_opt={_OPTIONS}",
        *PROTOS,
    ]
    # Our own interpreter and files, no input from outside.
    subprocess.run(command, check=True, env=environment)  # noqa: S603


def main() -> None:
    """Replace the checked-in messages."""
    target = _HERE / "messages"
    shutil.rmtree(target, ignore_errors=True)
    generate(target)


if __name__ == "__main__":
    main()
