"""A plugin's socket in `plugins_registry` after kubelet has refused the plugin."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fpga_plugin.kubernetes.kubelet.registry import Info, RegistrySocket, Reoffer

LIMIT = 60.0
INFO = Info("DRAPlugin", "fpga.intel.com", "/dra.sock", ("v1.DRAPlugin",))


def story(
    path: str, play: Callable[[Reoffer, RegistrySocket], Awaitable[None]], *, last: float = 0.0
) -> None:
    """Play it while the socket is there and made again after `last` seconds."""

    async def run() -> None:
        socket = RegistrySocket(path, INFO, lambda _: None)
        await socket.start()
        offer = Reoffer(socket, first=0.0, last=last)
        work = asyncio.create_task(offer.run())
        try:
            async with asyncio.timeout(LIMIT):
                await play(offer, socket)
            assert not work.done()
        finally:
            work.cancel()
            await asyncio.wait({work})
            await socket.stop()

    asyncio.run(run())
    assert not Path(path).exists(), "it went with the driver"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # a path of any length
    Path("registry").mkdir()
    return "registry/a-reg.sock"


def life(path: str) -> tuple[int, int]:
    """Of the socket's file, as kubelet reports two of them apart."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (0, 0)
    return (found.st_ino, found.st_ctime_ns)


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110  # nobody reports of a file
        await asyncio.sleep(0.001)


def test_each_refusal_gets_a_new_socket(path: str) -> None:
    async def play(offer: Reoffer, _socket: RegistrySocket) -> None:
        for _ in range(3):
            before = life(path)
            offer.told("not now")
            await until(lambda before=before: life(path) not in {before, (0, 0)})

    story(path, play)


def test_a_plugin_that_is_registered_keeps_its_socket(path: str) -> None:
    async def play(offer: Reoffer, _socket: RegistrySocket) -> None:
        before = life(path)
        offer.told("")
        offer.told("not now")
        offer.told("")  # kubelet has tried again by itself
        for _ in range(20):
            await asyncio.sleep(0)
        assert life(path) == before

    story(path, play)


def test_a_socket_that_cannot_be_made_is_tried_again(path: str) -> None:
    async def play(offer: Reoffer, socket: RegistrySocket) -> None:
        await socket.stop()
        os.rmdir("registry")
        offer.told("not now")
        for _ in range(20):
            await asyncio.sleep(0.001)
        os.mkdir("registry")
        await until(lambda: os.path.exists(path))

    story(path, play)


def test_it_waits_longer_after_each_refusal_and_not_for_ever() -> None:
    offer = Reoffer(RegistrySocket("a-reg.sock", INFO, lambda _: None))
    delays = [offer.told("not now") for _ in range(8)]
    assert delays == pytest.approx([5, 10, 20, 40, 80, 160, 160, 160], rel=0.25)
    for _ in range(2000):
        offer.told("not now")
    assert offer.told("not now") == pytest.approx(160, rel=0.25)
    assert offer.told("") == 0
    assert offer.told("not now") == pytest.approx(5, rel=0.25)
