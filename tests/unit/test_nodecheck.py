"""What kubelet's and the runtime's versions say of claims: a warning, and never more than that."""

import pytest

from fpga_plugin.dra.nodecheck import concerns

GOOD = "v1.36.3"


@pytest.mark.parametrize(
    "runtime",
    [
        "containerd://2.0.0",
        "containerd://2.1.4-k3s2",
        "containerd://v2.3.0-rc.1",
        "containerd://10.0.1",
        "cri-o://1.36.1",
        "containerd://Unknown",
        "containerd://",
        "somebody-else://0.1",
        "containerd 1.6",
        "",
        "://1.6",
        "x" * 1000,
    ],
)
def test_nothing_is_said_against_what_has_cdi_or_is_not_known(runtime: str) -> None:
    assert concerns(GOOD, runtime) == ()


@pytest.mark.parametrize(
    ("runtime", "said", "remedy"),
    [
        ("containerd://1.6.20~ds1", "knows no CDI", "update to containerd 2"),
        ("containerd://1.7.1", "knows no CDI", "update to containerd 2"),
        ("containerd://1.7.2", "CDI is off unless", "enable_cdi = true"),
        ("containerd://1.7.28-k3s1", "CDI is off unless", "enable_cdi = true"),
        ("docker://27.3.1", "cri-dockerd passes no CDI", "containerd 2 or CRI-O"),
    ],
)
def test_a_runtime_without_cdi_is_named_with_the_remedy(
    runtime: str, said: str, remedy: str
) -> None:
    (told,) = concerns(GOOD, runtime)
    assert runtime in told
    assert said in told
    assert remedy in told


@pytest.mark.parametrize(
    "kubelet",
    [
        "v1.34",
        "v1.34.0",
        "v1.36.3+k3s1",
        "v1.34.2-gke.10",
        "v2.0",
        "",
        "?",
    ],
)
def test_a_kubelet_that_serves_claims_or_is_not_known_is_no_concern(kubelet: str) -> None:
    assert concerns(kubelet, "containerd://2.0.0") == ()


@pytest.mark.parametrize("kubelet", ["v1.33.9", "v1.9.0", "1.26.1"])
def test_a_kubelet_that_is_too_old_is_named_with_the_remedy(kubelet: str) -> None:
    (told,) = concerns(kubelet, "containerd://2.0.0")
    assert kubelet in told
    assert "1.34" in told
    assert "FPGA_PLUGIN_MODE=device-plugin" in told


def test_a_foreign_version_neither_floods_nor_forges_a_line() -> None:
    told = concerns("v1.2\n" + "x" * 900, "containerd://1.6\n{" + "x" * 100)
    assert len(told) == 2
    assert all("\n" not in one and len(one.encode()) <= 400 for one in told)
