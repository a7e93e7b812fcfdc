"""The two listeners as the daemon has them."""

import asyncio
import gc
import warnings

from doubles import LIMIT
from structlog.testing import capture_logs

from fpga_plugin.observability import SOCKET
from fpga_plugin.observability.listeners import RECHECK, Listeners
from fpga_plugin.observability.status_context import StatusContext
from fpga_plugin.settings.settings import Settings
from fpga_plugin.settings.values import HttpAddress


def test_a_status_socket_that_somebody_removed_is_made_anew(tmp_path):
    path = tmp_path / SOCKET

    async def there():
        async with asyncio.timeout(LIMIT):
            while not path.is_socket():  # noqa: ASYNC110  # nothing reports it
                await asyncio.sleep(0.005)

    async def healthz() -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async def main():
        settings = Settings(state_dir=str(tmp_path), http_address=None)
        service = Listeners(StatusContext(settings), recheck=0.01)
        service.start()
        service.locked()
        try:
            await there()
            path.unlink()
            await there()
            return await healthz()
        finally:
            await service.close()

    with capture_logs() as lines:
        answer = asyncio.run(main())
    assert answer.endswith(b"ok\n")
    assert [line["event"] for line in lines] == [
        "the status socket was removed, and is created again"
    ]
    assert not path.exists()


def test_who_stops_at_any_instant_leaves_no_socket_open(tmp_path, monkeypatch):
    monkeypatch.setattr("fpga_plugin.observability.listeners.START_DELAY", 0)
    settings = Settings(state_dir=str(tmp_path), http_address=HttpAddress("", 0))

    async def stopped_after(steps: int) -> bool:
        service = Listeners(StatusContext(settings))
        service.start()
        service.locked()
        for _ in range(steps):
            await asyncio.sleep(0)
        await service.close()
        return bool(service.served)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        served = [asyncio.run(stopped_after(steps)) for steps in range(40)]
        gc.collect()
    assert not [each for each in told if issubclass(each.category, ResourceWarning)]
    assert not served[0]
    assert served[-1], "it stopped in each state that there is"


def test_the_look_for_it_comes_before_a_liveness_probe_gives_up():
    assert RECHECK < 60
