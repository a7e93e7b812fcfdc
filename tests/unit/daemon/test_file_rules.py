"""Which files the sandbox lets a plugin reach, by its settings."""

import sys
from pathlib import Path

import pytest
import yaml

import fpga_plugin
from fpga_plugin.daemon.file_rules import rules
from fpga_plugin.host.sandbox.landlock import DEVICES, OWN, READ, WRITE, Right
from fpga_plugin.settings.settings import (
    SETTINGS,
    BackendKind,
    RecoveryPolicy,
    ServedApi,
    Setting,
    Settings,
    load_settings,
)
from fpga_plugin.settings.values import parse_path

WRITES = ~(READ | Right.EXECUTE)
BRIDGES = (
    "devices/pci0000:00",
    "devices/platform/40000000.pcie/pci0001:00",
)


def written(allowed: dict[str, Right]) -> set[str]:
    return {path for path, right in allowed.items() if right & WRITES}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two host bridges, one of them an ARM machine's; a card on each, and a bus behind a bridge."""
    root = tmp_path / "host/sys"
    buses = root / "class/pci_bus"
    devices = root / "bus/pci/devices"
    for folder in (buses, devices, root / "bus/pci/drivers", root / "devices/system"):
        folder.mkdir(parents=True)
    for bridge, address in zip(BRIDGES, ("0000:3b:00.0", "0001:01:00.0"), strict=True):
        below = f"{bridge}/{address[:7]}:00.0/{address}"
        (root / below).mkdir(parents=True)
        (devices / address).symlink_to(f"../../../{below}")
    (buses / "0000:3b").symlink_to(f"../../{BRIDGES[0]}/0000:00:01.0/pci_bus/0000:3b")
    return root


def real(sysfs: Path, **settings: object) -> Settings:
    return Settings(sysfs_root=str(sysfs), dev_root="/host/dev", **settings)  # type: ignore[arg-type]


def test_of_sysfs_what_is_below_the_pci_host_bridges_is_written_and_nothing_else(sysfs: Path):
    settings = real(sysfs)
    allowed, _ = rules(settings, rebinds=False)
    bridges = {str(sysfs / bridge) for bridge in BRIDGES}
    beside_the_lock = f"{settings.kubelet_dir}/fpga-plugin"
    own = {
        settings.state_dir,
        settings.kubelet_dir,
        beside_the_lock,
        settings.dev_root,
        "/dev/null",
    }
    assert written(allowed) == bridges | own
    assert {allowed[bridge] for bridge in bridges} == {WRITE}
    assert allowed[str(sysfs / "devices")] == READ


def test_a_cards_iommu_group_is_read(sysfs: Path):
    allowed, _ = rules(real(sysfs), rebinds=False)
    assert allowed[str(sysfs / "kernel/iommu_groups")] == READ


@pytest.mark.parametrize(
    ("recovery", "rebinds", "expected"),
    [
        (RecoveryPolicy.NONE, False, False),
        (RecoveryPolicy.REBIND, False, True),
        (RecoveryPolicy.NONE, True, True),  # a former life's rebind has to be finished
    ],
)
def test_drivers_are_bound_only_where_cards_may_be_rebound(
    sysfs: Path, *, recovery: RecoveryPolicy, rebinds: bool, expected: bool
):
    allowed, _ = rules(real(sysfs, recovery=recovery), rebinds=rebinds)
    assert (str(sysfs / "bus/pci/drivers") in written(allowed)) is expected


def test_functions_of_slots_are_bound_to_vfio_pci_and_to_no_other_driver(sysfs: Path):
    vfio = sysfs / "bus/pci/drivers/vfio-pci"
    assert str(vfio) not in rules(real(sysfs), rebinds=False)[0]
    vfio.mkdir(parents=True)
    allowed, _ = rules(real(sysfs), rebinds=False)
    assert allowed[str(vfio)] == WRITE
    assert str(vfio.parent) not in allowed


def test_of_kubelets_directory_sockets_are_made_and_no_file_is_written():
    allowed, _ = rules(Settings(), rebinds=False)
    right = allowed[Settings().kubelet_dir]
    assert not right & (WRITE | Right.MAKE_REG)
    assert Right.MAKE_SOCK in right


def test_of_kubelets_root_the_names_of_pods_are_read_and_nothing_else(tmp_path: Path):
    (tmp_path / "pods").mkdir()
    allowed, _ = rules(Settings(kubelet_root=str(tmp_path)), rebinds=False)
    below = {path: right for path, right in allowed.items() if path.startswith(str(tmp_path))}
    assert below == {str(tmp_path / "pods"): Right.READ_DIR}


def test_a_dra_driver_reads_kubelets_root_and_writes_where_its_sockets_and_files_are(
    tmp_path: Path,
):
    root, cdi = str(tmp_path), "/var/run/cdi"
    settings = Settings(mode=ServedApi.DRA, kubelet_root=root, backend=BackendKind.SIMULATED)
    allowed, _ = rules(settings, rebinds=False)
    without, _ = rules(Settings(backend=BackendKind.SIMULATED), rebinds=False)
    sockets = {f"{root}/plugins/fpga.intel.com", f"{root}/plugins_registry"}
    metadata = f"{root}/plugins/fpga.intel.com/metadata"
    assert written(allowed) - written(without) == sockets | {cdi, metadata}
    for path in sockets:
        assert allowed[path] == READ | Right.MAKE_SOCK | Right.REMOVE_FILE
    assert allowed[cdi] == allowed[metadata] == OWN
    assert allowed[root] & ~Right.READ_DIR == Right.READ_FILE


def test_neither_proc_nor_the_rest_of_sysfs_nor_any_program_is_ever_within_reach(sysfs: Path):
    allowed, _ = rules(real(sysfs, recovery=RecoveryPolicy.REBIND), rebinds=True)
    assert allowed["/proc"] == READ
    assert not {"/", "/sys", "/dev", str(sysfs), "/proc/sys"} & allowed.keys()
    assert not any(Right.EXECUTE in right for right in allowed.values())
    made = Right.MAKE_CHAR | Right.MAKE_BLOCK | Right.MAKE_SYM | Right.MAKE_FIFO
    assert not any(right & made for right in allowed.values())


def test_simulated_cards_take_neither_sysfs_nor_dev(tmp_path: Path):
    settings = Settings(backend=BackendKind.SIMULATED, state_dir=str(tmp_path))
    allowed, _ = rules(settings, rebinds=False)
    assert written(allowed) == {
        settings.state_dir,
        settings.simulated_dir,
        settings.kubelet_dir,
        f"{settings.kubelet_dir}/fpga-plugin",
        "/dev/null",
    }
    assert allowed[settings.simulated_dir] == OWN
    assert "/dev" not in allowed


def test_real_cards_nodes_are_opened_wherever_dev_is(sysfs: Path):
    assert rules(real(sysfs), rebinds=False)[0]["/host/dev"] == DEVICES


def test_a_store_that_is_still_to_come_is_read_when_it_comes(tmp_path: Path):
    allowed, unreached = rules(
        Settings(bitstream_dir=str(tmp_path / "to/come"), cgroup_root=None), rebinds=False
    )
    assert allowed[str(tmp_path)] == READ
    assert unreached == []


def test_a_path_that_only_the_root_could_give_is_told():
    _, unreached = rules(Settings(bitstream_dir="/nonexistent/store"), rebinds=False)
    assert unreached == ["/nonexistent/store"]


def test_a_store_that_is_a_link_may_be_switched_to_its_neighbour(tmp_path: Path):
    (tmp_path / "releases/1").mkdir(parents=True)
    (tmp_path / "current").symlink_to("releases/1")
    settings = Settings(bitstream_dir=str(tmp_path / "current"))
    assert str(tmp_path / "releases") in rules(settings, rebinds=False)[0]


def test_a_kubeconfig_is_read_with_the_files_that_it_names(tmp_path: Path):
    for name in ("kube", "certificates", "keys"):
        (tmp_path / name).mkdir()
    path = tmp_path / "kube/config"
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"cluster": {"certificate-authority": "../certificates/ca.pem"}}],
                "users": [{"user": {"client-key": str(tmp_path / "keys/key"), "token": "t"}}],
            }
        )
    )
    allowed, _ = rules(Settings(kubeconfig=str(path)), rebinds=False)
    assert {str(tmp_path / name) for name in ("kube", "certificates", "keys")} <= allowed.keys()


@pytest.mark.parametrize("content", ["", "[", "- 1", "users: [{user: {client-key: 3}}]", "\x00"])
def test_a_kubeconfig_that_makes_no_sense_is_for_others_to_complain_of(
    tmp_path: Path, content: str
):
    path = tmp_path / "config"
    path.write_text(content)
    allowed, _ = rules(Settings(kubeconfig=str(path)), rebinds=False)
    assert str(tmp_path) in allowed


def test_files_that_python_imports_later_may_be_read_and_the_working_directory_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    modules, working = tmp_path / "modules", tmp_path / "working"
    modules.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setattr(sys, "path", [str(working), "", "/", str(modules)])
    assert {str(modules), str(Path(fpga_plugin.__file__).parent)} <= rules(
        Settings(), rebinds=False
    )[0].keys()
    assert not {str(working), "", "/"} & rules(Settings(), rebinds=False)[0].keys()
    working.rmdir()
    assert str(modules) in rules(Settings(), rebinds=False)[0]


def test_the_policys_directory_is_read_since_the_file_is_replaced(tmp_path: Path):
    settings = Settings(policy_file=str(tmp_path / "file.yaml"))
    assert str(tmp_path) in rules(settings, rebinds=False)[0]


@pytest.mark.parametrize(
    "setting",
    # Landlock does not rule who connects to a socket.
    [one for one in SETTINGS if one.parse is parse_path and not one.name.endswith("_SOCKET")],
    ids=lambda one: one.name,
)
def test_each_path_that_a_setting_names_is_reached(setting: Setting, tmp_path: Path):
    path = tmp_path / "of-the-setting" / "itself"
    (path / "bus").mkdir(parents=True)
    allowed: set[Path] = set()
    for kind in ("dfl", "simulated"):
        for mode in ServedApi:
            environ = {
                "FPGA_PLUGIN_BACKEND": kind,
                "FPGA_PLUGIN_MODE": mode.value,
                setting.name: str(path),
            }
            allowed |= {Path(one) for one in rules(load_settings(environ), rebinds=False)[0]}
    near = {path, path.parent, *path.iterdir()}
    assert allowed & near, "add it to daemon/file_rules.py: the sandbox refuses it else"
