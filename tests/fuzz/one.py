"""Fuzzes one target in this process: `one.py NAME [libFuzzer options]`. Begun by `tests/fuzz`."""

import shlex
import sys

import atheris

with atheris.instrument_imports(include=["fpga_plugin"]):
    import targets

# libFuzzer starts itself again, by a shell, to choose what is kept.
again = shlex.join([sys.executable, *sys.argv[:2]])
atheris.Setup([again, *sys.argv[2:]], targets.TARGETS[sys.argv[1]].run)
atheris.Fuzz()
