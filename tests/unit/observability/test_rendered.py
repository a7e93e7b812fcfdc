"""What strangers may ask for is rendered at most once a second, in whatever number they ask."""

import asyncio

import pytest

from fpga_plugin.observability.http import text
from fpga_plugin.observability.rendered import Rendered

SECONDS = 0.2


class Page:
    """Counts how often it is rendered, and when that begins."""

    def __init__(self):
        self.began = []

    async def __call__(self):
        self.began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)
        return text(200, f"{len(self.began)}")

    @property
    def apart(self):
        return [later - before for before, later in zip(self.began, self.began[1:], strict=False)]


def test_a_hundred_who_ask_at_once_get_one_rendering():
    async def scenario():
        page, rendered = Page(), Rendered(SECONDS)
        answers = await asyncio.gather(*(rendered.get("", page) for _ in range(100)))
        assert {answer.body for answer in answers} == {b"1\n"}
        await asyncio.sleep(SECONDS * 1.1)
        assert (await rendered.get("", page)).body == b"2\n", "it is not kept for longer"

    asyncio.run(scenario())


def test_another_question_waits_for_its_second_and_has_its_own_answer():
    async def scenario():
        page, rendered = Page(), Rendered(SECONDS)
        bodies = [(await rendered.get(words, page)).body for words in ("a", "b", "a")]
        assert bodies == [b"1\n", b"2\n", b"3\n"]
        assert min(page.apart) >= SECONDS

    asyncio.run(scenario())


def test_who_goes_away_or_meets_an_error_brings_no_further_rendering():
    async def scenario():
        page, rendered = Page(), Rendered(SECONDS)

        async def fails():
            await page()
            raise ValueError

        gone = asyncio.create_task(rendered.get("", page))
        await asyncio.sleep(0.005)
        gone.cancel()
        with pytest.raises(ValueError):  # noqa: PT011  # it has no words
            await rendered.get("", fails)
        assert (await rendered.get("", page)).status == 200
        assert len(page.began) == 3
        assert min(page.apart) >= SECONDS

    asyncio.run(scenario())
