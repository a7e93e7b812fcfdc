"""The mask of mailbox requests, and the user function's copy of it, which comes late."""

import errno
from pathlib import Path

import pytest
from doubles.alveo import CARD, Rig

from fpga_plugin.errors import CardGoneError, FpgaPluginError, HardwareError
from fpga_plugin.hardware.xrt import defs, mask
from fpga_plugin.hardware.xrt.handles import functions_of
from fpga_plugin.hardware.xrt.mask import set_mask

ATTRIBUTE = "config_mailbox_channel_disable"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig.with_a_clock(tmp_path, monkeypatch)


def test_it_is_set_once_the_user_function_has_it(rig: Rig):
    set_mask(rig.kernel, CARD, functions_of(rig.card()), defs.MASK)
    assert rig.board().copy == defs.MASK


@pytest.mark.parametrize(
    ("code", "kind", "hint"),
    [
        (errno.ENOENT, CardGoneError, "is xclmgmt bound?"),
        (errno.ENOTDIR, CardGoneError, "is xclmgmt bound?"),
        (errno.EACCES, HardwareError, "has to run as root"),
        (errno.EPERM, HardwareError, "has to run as root"),
        (errno.EROFS, HardwareError, "has to run as root"),
        (errno.EIO, HardwareError, "see the kernel's log"),
    ],
)
def test_why_it_cannot_be_set_is_told(rig: Rig, code: int, kind: type[FpgaPluginError], hint: str):
    functions = functions_of(rig.card())
    rig.kernel.fails["write", ATTRIBUTE] = OSError(code, "because")
    with pytest.raises(FpgaPluginError) as caught:
        set_mask(rig.kernel, CARD, functions, defs.MASK)
    assert type(caught.value) is kind
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("attribute", "answer", "state"),
    [
        (f"10:00.1/{ATTRIBUTE}", "0x1", "the mask is 0x643a0, its copy 0x1 where 0x643a0 was set"),
        ("10:00.1/ready", "0x0", "its copy 0x643a0 where 0x643a0 was set, and it is not ready"),
        ("10:00.1/dev_offline", "1", "its copy 0x643a0 where 0x643a0 was set, and it is not ready"),
        (
            "10:00.1/ready",
            OSError(errno.EIO, "Input/output error"),
            "the mask is not there, its copy not there where 0x643a0 was set, and it is not ready",
        ),
    ],
)
def test_a_user_function_that_does_not_follow_is_an_error_that_says_what_there_is(
    rig: Rig, attribute: str, answer: str | OSError, state: str
):
    functions = functions_of(rig.card())
    rig.kernel.instead[attribute] = answer
    with pytest.raises(HardwareError, match="does not follow") as caught:
        set_mask(rig.kernel, CARD, functions, defs.MASK)
    assert state in caught.value.message
    assert rig.clock.now >= mask._COPY_SECONDS
