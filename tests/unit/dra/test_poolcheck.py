"""Whether others write into the node's pool: what is asked, and what is made of it.

The real API server's table: tests/dra/test_slices.py.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from doubles.apiserver import ApiServerDouble, Reply
from doubles.loops import beside, until
from structlog.testing import capture_logs

from fpga_plugin.dra.pool import Pool
from fpga_plugin.dra.poolcheck import _NAMED, PAUSE_SECONDS, PoolCheck, pause

LIMIT = 30.0
DRIVER, NODE = "fpga.intel.com", "node-b"
OWN = ("d0000", NODE, DRIVER, NODE)
EVIL = ("evil", "node-a", DRIVER, NODE)


def table(*rows: tuple[str, ...], columns: str = "Name Node Driver Pool Age") -> dict[str, Any]:
    return {
        "kind": "Table",
        "columnDefinitions": [{"name": name, "type": "string"} for name in columns.split()],
        "rows": [{"cells": [*row, "5d"], "object": None} for row in rows],
    }


Story = Callable[[ApiServerDouble, PoolCheck, list[str]], Awaitable[None]]


def checked(folder: Path, *replies: Reply, story: Story) -> list[dict[str, Any]]:
    """What was logged."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT), ApiServerDouble() as server:
            server.replies.extend(replies)
            warned: list[str] = []
            # It goes on only for as long as there is an answer left.
            check = PoolCheck(
                server.kubeconfig(folder),
                Pool(DRIVER, NODE),
                warn=warned.append,
                pause=lambda: 0.01 if server.replies else LIMIT,
            )
            async with beside(check.run()):
                await story(server, check, warned)

    with capture_logs() as logged:
        asyncio.run(main())
    return [line for line in logged if line["log_level"] != "debug"]


def test_the_drivers_slices_are_asked_for_as_a_table_from_the_cache(tmp_path: Path) -> None:
    async def story(server: ApiServerDouble, check: PoolCheck, warned: list[str]) -> None:
        await until(lambda: server.requests)
        (asked,) = server.requests
        assert asked.startswith("GET /apis/resource.k8s.io/v1/resourceslices?")
        assert f"fieldSelector=spec.driver={DRIVER}" in asked
        assert "includeObject=None" in asked
        assert "resourceVersion=0" in asked
        assert (check.foreign, check.problem, warned) == ((), "", [])

    checked(tmp_path, Reply(200, table(OWN)), story=story)


def test_a_foreign_slice_is_told_once_and_no_more_when_it_is_gone(tmp_path: Path) -> None:
    async def story(_: ApiServerDouble, check: PoolCheck, warned: list[str]) -> None:
        await until(lambda: check.foreign == ("evil",))
        await until(lambda: check.foreign == ())
        assert check.problem == ""
        (warning,) = warned
        assert "'evil' of node 'node-a'" in warning

    evil, well = Reply(200, table(EVIL, OWN)), Reply(200, table(OWN))
    logged = checked(tmp_path, evil, evil, evil, well, story=story)
    assert [line["event"] for line in logged] == [
        "foreign ResourceSlices in the node's pool",
        "the node's pool has no foreign ResourceSlices any more",
    ]


def test_slices_of_other_pools_and_drivers_are_not_ours_to_judge(tmp_path: Path) -> None:
    others = [("o", "node-a", DRIVER, "node-a"), ("p", "node-a", "gpu.example.com", NODE)]
    everywhere = ("e", "", DRIVER, NODE)

    async def story(_: ApiServerDouble, check: PoolCheck, warned: list[str]) -> None:
        await until(lambda: check.foreign)
        assert check.foreign == ("e",), "a slice of no node in particular is foreign"
        assert len(warned) == 1

    checked(
        tmp_path, Reply(200, table(*others)), Reply(200, table(*others, everywhere)), story=story
    )


def test_a_server_that_is_away_or_talks_nonsense_leaves_what_is_known(tmp_path: Path) -> None:
    nonsense = [
        Reply(503),
        Reply(0),
        Reply(200, b"[]"),
        Reply(200, {"kind": "ResourceSliceList", "items": []}),
        Reply(200, table(OWN, columns="Name Age")),
        Reply(200, table(("short",))),
    ]

    async def story(server: ApiServerDouble, check: PoolCheck, warned: list[str]) -> None:
        await until(lambda: check.foreign)
        await until(lambda: not server.replies)
        await asyncio.sleep(0.05)
        assert check.foreign == ("evil",)
        assert len(warned) == 1

    checked(tmp_path, Reply(200, table(EVIL)), *nonsense, Reply(503), story=story)


@pytest.mark.parametrize("number", [4, 5000])
def test_many_foreign_slices_make_a_short_message(tmp_path: Path, number: int) -> None:
    rows = [(f"{one:04}" + "x" * 240, "n" * 250, DRIVER, NODE) for one in range(number)]

    async def story(_: ApiServerDouble, check: PoolCheck, __: list[str]) -> None:
        await until(lambda: check.foreign)
        assert len(check.foreign) == number
        assert f"and {number - 3} more" in check.problem
        assert len(check.problem.encode()) <= 1024

    checked(tmp_path, Reply(200, table(*rows)), story=story)


def test_nodes_do_not_ask_at_the_same_time() -> None:
    pauses = {pause() for _ in range(50)}
    assert len(pauses) > 40
    assert all(PAUSE_SECONDS / 2 <= one <= 1.5 * PAUSE_SECONDS for one in pauses)


def test_three_foreign_slices_are_named_and_of_more_only_how_many(tmp_path: Path) -> None:
    def of(number: int) -> Reply:
        return Reply(200, table(*((f"e{n}", "node-a", DRIVER, NODE) for n in range(number))))

    async def story(server: ApiServerDouble, check: PoolCheck, warned: list[str]) -> None:
        await until(lambda: len(warned) == 2)
        assert "more" not in warned[0].partition(";")[0]
        assert "and 1 more;" in warned[1]
        await asyncio.sleep(0.1)
        assert len(server.requests) == 2, "and then it pauses"

    checked(tmp_path, of(_NAMED), of(_NAMED + 1), story=story)


def test_a_table_without_rows_has_no_slice(tmp_path: Path) -> None:
    async def story(_: ApiServerDouble, check: PoolCheck, warned: list[str]) -> None:
        await until(lambda: check.foreign == ("evil",))
        await until(lambda: check.foreign == ())

    evil = Reply(200, table(EVIL))
    checked(tmp_path, evil, Reply(200, table() | {"rows": None}), story=story)
