"""Fuzzes one target in this process: `one.py NAME [libFuzzer options]`. Begun by `tests/fuzz`."""

import sys

import atheris

with atheris.instrument_imports(include=["fpga_plugin"]):
    import targets

atheris.Setup([sys.argv[0], *sys.argv[2:]], targets.TARGETS[sys.argv[1]].run)
atheris.Fuzz()
