"""The environment that the plugin is measured in: what it runs on and no more, as in its image.

The clone's own environment has the tools of the tests too, and some of the plugin's dependencies
import more where they find more: structlog imports rich, betterproto2 imports pydantic. That alone
would cost some 20 ms of the start and some MiB.
"""

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FOLDER = ROOT / ".cache" / "bench-venv"


def runtime() -> Path:
    """The Python of that environment; it is made on the first use, and when pyproject.toml changed.

    Raises:
        subprocess.CalledProcessError: pip failed, and said why.
    """
    python = _FOLDER / "bin" / "python"
    stamp = _FOLDER / "made-for"
    made_for = hashlib.sha256(
        b"".join(((ROOT / "pyproject.toml").read_bytes(), sys.version.encode(), bytes(ROOT)))
    ).hexdigest()
    if not python.exists() or not stamp.exists() or stamp.read_text() != made_for:
        print(f"making {_FOLDER}, with the plugin's own dependencies only ...", file=sys.stderr)
        venv.create(_FOLDER, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--editable", str(ROOT)], check=True, stdout=sys.stderr)
        stamp.write_text(made_for)
    # Compiled as an image has it: the first start must not be the one that compiles.
    for package in (str(ROOT / "fpga_plugin"), str(_FOLDER / "lib")):
        subprocess.run([str(python), "-m", "compileall", "-q", "-j0", package], check=False)
    return python
