"""What parts on nodes of their own said (`namespace.py`, `pods_namespace.py`), also at a signal."""

import subprocess
import sys

import pytest
from repository import module

kubelet = module("kubelet", "namespace")
dra = module("dra", "pods_namespace")


class Part:
    """A node whose command has said something when a signal ends the whole."""

    def __init__(self, name, _version, _part, _command, output) -> None:
        output.write_text(f"said in {name}\n")

    def wait(self) -> int:
        kubelet.interrupted(15, None)
        return 0

    def close(self) -> None:
        sys.stdout.write("closed\n")


@pytest.mark.parametrize(
    ("run", "parts"),
    [
        (lambda _: kubelet.outside("1.36", ["x"]), kubelet.PARTS),
        (
            lambda tmp: dra._run("1.36", {n: (["x"], tmp / n) for n in ("one", "two")}),
            ("one", "two"),
        ),
    ],
)
def test_a_signal_ends_the_nodes_after_their_output_was_shown(
    run, parts, monkeypatch, tmp_path, capsys
):
    for one in {kubelet, dra.namespace}:
        monkeypatch.setattr(one, "missing", str)
        monkeypatch.setattr(one, "kubelets", list)
        monkeypatch.setattr(one, "sweep", lambda: None)
        monkeypatch.setattr(one, "BUILT", tmp_path)
        monkeypatch.setattr(one, "Node", Part)
        monkeypatch.setattr(one.signal, "signal", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    with pytest.raises(SystemExit) as ended:
        run(tmp_path)
    assert ended.value.code == 143
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["closed", "closed"]
    for part in parts:
        at = said.index(f"--- {part} ---")
        assert said[at + 1].startswith("said in "), said
