"""What `make bench` says of imports (`benchmarks/parts.py`)."""

import pytest
from bench_support import bench_module


@pytest.fixture
def parts():
    with bench_module("parts") as module:
        yield module


def test_imports_are_summed_by_package_and_of_the_plugin_by_the_package_below(parts):
    took, modules = parts.imports(
        "import time: self [us] | cumulative | imported package\n"
        "import time:      1500 |       1500 |   asyncio.events\n"
        "import time:       500 |       2000 | asyncio\n"
        '{"event": "import time: not of the interpreter"}\n'
        "import time:       250 |        250 |     fpga_plugin.allocation.journal.rows\n"
        "import time:       750 |       1000 |   fpga_plugin.allocation\n"
        "import time:       100 |       1100 | fpga_plugin\n"
    )
    assert took == {"asyncio": 2.0, "fpga_plugin.allocation": 1.0, "fpga_plugin": 0.1}
    assert modules == {"asyncio": 2, "fpga_plugin.allocation": 2, "fpga_plugin": 1}
