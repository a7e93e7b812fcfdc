"""Modules that the plugin never needs; each test in a new interpreter, which has none of them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fpga_plugin
from fpga_plugin.api.no_cookies import NO_COOKIES


def fresh(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


BLOCK = "import sys; from fpga_plugin.process.stand_ins import stand_ins\nwith stand_ins(): "
STARTED = "import sys; from fpga_plugin import cli; cli._import_daemon(); "


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("inspect", "inspect.getsource(fractions)"),
        ("inspect", "inspect.signature(lambda number: 0).parameters['number']"),
        ("ctypes.util", "ctypes.util.find_library('no-such-library')"),
        ("pickle", "pickle.loads(pickle.dumps(3))"),
        ("decimal", "decimal.getcontext()"),
        ("uuid", "uuid.uuid4().hex"),
        ("ipaddress", "ipaddress.ip_address('::1')"),
        ("typing_extensions", "typing_extensions.deprecated"),
        ("importlib.metadata", "importlib.metadata.version('grpclib')"),
    ],
)
def test_who_had_a_stand_in_still_gets_what_the_module_does(module, use):
    top = module.partition(".")[0]
    # Whoever imported the module in the block, and whoever does so afterwards.
    fresh(f"{BLOCK}import {module}\nimport fractions\nold = {top}\n{use}")
    fresh(f"{BLOCK}import {module}\nimport {module}\nimport fractions\n{use}")


def test_a_name_from_a_module_that_was_asked_for_in_the_block_is_the_modules_own():
    fresh(f"{BLOCK}from pickle import loads, dumps; assert loads(dumps(3)) == 3")
    fresh(f"{BLOCK}import pickle; pickle.dumps\nimport pickle as later; assert later.dumps(3)")


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("inspect", "inspect.signature(lambda number: 0).parameters['number']"),
        ("ctypes.util", "ctypes.util.find_library('no-such-library')"),
        ("ipaddress", "ipaddress.IPv6Address('::1')"),
        ("importlib.metadata", "importlib.metadata.version('hypothesis')"),
    ],
)
def test_what_it_knows_only_in_part_the_module_answers_even_in_the_block(module, use):
    fresh(f"{BLOCK}import {module}; {use}")


def test_the_api_servers_client_imports_no_kubernetes_types_until_they_are_used():
    fresh(
        f"{STARTED}import fpga_plugin.api.server\n"
        "for name in ('lightkube.models.core_v1', 'yaml', 'importlib.metadata'):\n"
        "    assert name not in sys.modules, name\n"
        "from lightkube.core import client, decoders, internal_models, exceptions\n"
        "from lightkube.resources.core_v1 import Pod, PodLog\n"
        "assert client.core_v1.PodLog is PodLog and client.core_v1.Pod is Pod\n"
        "from lightkube.models.meta_v1 import Status\n"
        "assert decoders.meta_v1.Status is Status\n"
        "import lightkube.generic_resource, lightkube.codecs, yaml\n"
        "assert lightkube.codecs.yaml.safe_load('[1]') == yaml.safe_load('[1]')"
    )


CLIENT = f"{STARTED}import fpga_plugin.api.server, httpx2\n"


def test_the_api_servers_client_imports_nothing_that_keeps_cookies():
    fresh(
        f"{CLIENT}for name in ('idna', 'email.message', 'http.client', 'http.cookiejar',\n"
        "             'urllib.request', 'shutil', 'tempfile', 'lzma'):\n"
        "    assert name not in sys.modules, name"
    )


def test_the_api_servers_client_asks_for_no_types_that_only_readers_need():
    fresh(
        f"{CLIENT}import anyio, anyio._backends._asyncio\n"
        "for name in ('typing_extensions', 'mimetypes'): assert name not in sys.modules, name\n"
        "assert httpx2.URL('http://a/b').raw[1] == b'a'  # deprecated, and there\n"
        "class Typed(anyio.TypedAttributeProvider): pass\n"
        "assert Typed().extra(3, default=4) == 4\n"
        "form = httpx2.Request('POST', 'http://a/', files={'f': ('a.png', b'')}).read()\n"
        "assert b'image/png' in form\n"
        "from typing_extensions import TypeVar; TypeVar('T', default=int)"
    )


def test_a_cookie_that_a_proxy_sets_is_not_sent_back():
    fresh(
        f"{CLIENT}sent = []\n"
        "def answer(request):\n"
        "    sent.append(request.headers.get('Cookie'))\n"
        "    return httpx2.Response(200, headers={'Set-Cookie': 'a=b; Path=/'}, json={})\n"
        "with httpx2.Client(transport=httpx2.MockTransport(answer)) as client:\n"
        "    for _ in range(2): assert client.get('http://localhost/').status_code == 200\n"
        "assert sent == [None] * 2, sent"
    )


def test_hosts_proxies_and_digests_are_still_understood():
    fresh(
        f"{CLIENT}url = httpx2.URL('http://b\u00fccher.example/')\n"
        "assert url.raw_host == b'xn--bcher-kva.example'\n"
        "assert httpx2.URL('http://xn--bcher-kva.example/').host == 'b\u00fccher.example'\n"
        "import os; os.environ['http_proxy'] = 'http://127.0.0.1:1'\n"
        "from httpx2._utils import get_environment_proxies\n"
        "assert 'http://' in get_environment_proxies()\n"
        "from httpx2._auth import parse_http_list\n"
        "assert parse_http_list('a, \"b, c\"') == ['a', '\"b, c\"']\n"
        "import urllib.request, http.cookiejar, email.message\n"
        "assert urllib.request.Request('http://a/').host == 'a'\n"
        "assert http.cookiejar.CookieJar.set_cookie and email.message.Message.get_all"
    )


def test_a_name_that_nobody_has_is_an_error_as_ever():
    fresh(
        f"{BLOCK}import pickle\n"
        "try: pickle.no_such\nexcept AttributeError as error: assert 'no_such' in str(error)\n"
        "else: raise SystemExit('it has one')"
    )


def test_afterwards_the_real_modules_are_imported():
    fresh(
        f"{BLOCK}import decimal, uuid, inspect, ctypes.util\n"
        "import ctypes.util, decimal, inspect, uuid\n"
        "for module in (ctypes.util, decimal, inspect, uuid): assert module.__file__, module"
    )


def test_a_module_that_was_imported_before_stays():
    fresh(
        f"import inspect, ssl; {BLOCK}assert sys.modules['inspect'] is inspect\n"
        "assert sys.modules['inspect'] is inspect and sys.modules['ssl'] is ssl"
    )


def test_an_import_that_fails_leaves_no_stand_in_behind():
    fresh(
        f"{BLOCK.replace('with', 'try:' + chr(10) + '  with')}import no_such_module\n"
        "except ImportError: pass\nimport pickle; assert pickle.__file__"
    )


def test_signal_handlers_are_still_told_from_coroutines():
    fresh(
        f"{STARTED}import asyncio, signal\n"
        "async def main():\n"
        "    async def handler(): pass\n"
        "    loop = asyncio.get_running_loop()\n"
        "    loop.add_signal_handler(signal.SIGUSR1, asyncio.Event().set)\n"
        "    try: loop.add_signal_handler(signal.SIGUSR2, handler)\n"
        "    except TypeError: return\n"
        "    raise SystemExit('a coroutine function is no handler')\n"
        "asyncio.run(main())"
    )


def test_betterproto2_still_knows_its_version():
    fresh(
        f"{STARTED}from importlib.metadata import version; import betterproto2\n"
        "assert version('betterproto2') == betterproto2.__version__"
    )


def test_grpclib_still_writes_hosts():
    fresh(
        f"{STARTED}import asyncio\nfrom grpclib.client import Channel\n"
        "async def main():\n"
        "    for host, text in (('::1', '[::1]:1'), ('node', 'node:1')):\n"
        "        assert Channel(host, 1)._authority == text\n"
        "asyncio.run(main())"
    )


def imported(tree: ast.AST) -> set[str]:
    """Modules, and names of modules, that a source imports anywhere."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def test_nothing_of_ours_could_be_left_with_a_jar_that_keeps_no_cookies():
    for path in Path(fpga_plugin.__file__).parent.rglob("*.py"):
        assert not imported(ast.parse(path.read_text())) & NO_COOKIES.keys(), path
