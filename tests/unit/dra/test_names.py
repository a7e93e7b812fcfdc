"""Names of devices in the node's pool."""

from fpga_plugin.dra.names import devices_of


def test_names_that_others_wrote_are_no_devices() -> None:
    assert [*devices_of(["gpu-0", "0000-3b-00-0-p0", "../x", "", "0000-3b-00-0"])] == [
        "0000-3b-00.0-p0",
        "0000-3b-00.0",
    ]
