"""Settings: what is taken, what is refused and how that is said."""

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpga_plugin.errors import SettingsError
from fpga_plugin.ids import CardId, PciAddress
from fpga_plugin.settings import docs as config_docs
from fpga_plugin.settings.settings import (
    DEFAULT_INTERFACE_ID,
    SETTINGS,
    Advertise,
    BackendKind,
    CardSelection,
    Exposure,
    HttpAddress,
    LogFormat,
    LogLevel,
    RecoveryPolicy,
    SandboxMode,
    ScrubPolicy,
    ServedApi,
    Settings,
    SimulatedGroup,
    SimulatedKind,
    TrustMode,
    UnknownVariables,
    load_settings,
)

ROOT = Path(__file__).parents[3]
OTHER_ID = "d8424dc4a4a3c413f89e433683f9040b"


def load(**values: str) -> Settings:
    return load_settings({f"FPGA_PLUGIN_{name}": value for name, value in values.items()})


def refusal(**values: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(**values)
    return caught.value.message


def test_an_empty_environment_gives_the_documented_defaults():
    assert load_settings({}) == Settings()
    assert dataclasses.asdict(load_settings({})) == {
        "mode": ServedApi.DEVICE_PLUGIN,
        "resource_prefix": "fpga.intel.com",
        "xrt_resource_prefix": "fpga.amd.com",
        "xrt_shell_resources": False,
        "xrt_tenant_loads": False,
        "neighbours": None,
        "advertise": Advertise.BOTH,
        "interface_aliases": False,
        "backend": BackendKind.AUTO,
        "cards": {"only": None, "excluded": frozenset()},
        "slot_functions": (),
        "slot_identity": None,
        "observe": False,
        "sysfs_root": "/sys",
        "dev_root": "/dev",
        "cgroup_root": "/sys/fs/cgroup",
        "kubelet_dir": "/var/lib/kubelet/device-plugins",
        "kubelet_root": "/var/lib/kubelet",
        "cdi_dir": "/var/run/cdi",
        "podresources_socket": "/var/lib/kubelet/pod-resources/kubelet.sock",
        "pods_socket": "/var/lib/kubelet/pods-api/pods-api.sock",
        "kubeconfig": None,
        "bitstream_dir": "/srv/intel.com/fpga",
        "trust": TrustMode.ANY,
        "keys_dir": None,
        "verified_size": 4 << 30,
        "state_dir": "/var/lib/fpga-plugin",
        "scrub": ScrubPolicy.REQUIRED,
        "uncleared_memory": Exposure.ALLOW,
        "untranslated_dma": Exposure.ALLOW,
        "recovery": RecoveryPolicy.NONE,
        "sandbox": SandboxMode.AUTO,
        "reconcile_interval": 2.0,
        "health_interval": 30.0,
        "http_address": ("", 9102),
        "http_hosts": None,
        "policy_file": None,
        "cdi_devices": None,
        "status_page": False,
        "events": False,
        "log_level": LogLevel.INFO,
        "log_format": LogFormat.JSON,
        "simulated_cards": (
            {
                "cards": 2,
                "regions": 3,
                "interface_id": "ce48969398f05f33946d560708be108a",
                "kinds": frozenset(),
            },
        ),
        "simulated_dir": "/var/lib/fpga-plugin/simulated",
        "simulated_pr_seconds": 0.05,
        "node_name": None,
        "warnings": (),
        "given": (),
        "unknown_variables": UnknownVariables.WARN,
        "debug_namespaces": None,
    }


def test_every_default_is_what_its_own_text_gives():
    environ = {setting.name: setting.default for setting in SETTINGS if setting.default}
    assert load_settings(environ) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "attribute", "value"),
    [
        ("RESOURCE_PREFIX", "fpga.example.org", "resource_prefix", "fpga.example.org"),
        ("XRT_RESOURCE_PREFIX", "amd.example.org", "xrt_resource_prefix", "amd.example.org"),
        ("XRT_SHELL_RESOURCES", "1", "xrt_shell_resources", True),
        ("XRT_TENANT_LOADS", "true", "xrt_tenant_loads", True),
        ("BACKEND", "xrt", "backend", BackendKind.XRT),
        ("ADVERTISE", "region", "advertise", Advertise.REGION),
        ("ADVERTISE", "whole", "advertise", Advertise.WHOLE),
        ("BACKEND", "dfl", "backend", BackendKind.DFL),
        ("BACKEND", "simulated", "backend", BackendKind.SIMULATED),
        ("UNCLEARED_MEMORY", "refuse-regions", "uncleared_memory", Exposure.REFUSE_REGIONS),
        ("UNTRANSLATED_DMA", "refuse", "untranslated_dma", Exposure.REFUSE),
        ("OBSERVE", "true", "observe", True),
        ("OBSERVE", "TRUE", "observe", True),
        ("OBSERVE", "1", "observe", True),
        ("OBSERVE", "False", "observe", False),
        ("OBSERVE", "0", "observe", False),
        (
            "SLOT_FUNCTIONS",
            "0000:3b:00.0=0000:3b:00.5+0000:3b:00.6, 0000:86:00.0=0000:86:00.1",
            "slot_functions",
            (
                ("0000-3b-00.0", (PciAddress(0, 0x3B, 0, 5), PciAddress(0, 0x3B, 0, 6))),
                ("0000-86-00.0", (PciAddress(0, 0x86, 0, 1),)),
            ),
        ),
        ("SLOT_IDENTITY", "0000:3b:00.0", "slot_identity", frozenset({"0000-3b-00.0"})),
        ("SYSFS_ROOT", "/host/sys/", "sysfs_root", "/host/sys"),
        ("DEV_ROOT", "/", "dev_root", "/"),
        ("CGROUP_ROOT", "", "cgroup_root", None),
        ("PODRESOURCES_SOCKET", "", "podresources_socket", None),
        ("PODS_SOCKET", "", "pods_socket", None),
        ("KUBECONFIG", "/etc/kube/config", "kubeconfig", "/etc/kube/config"),
        ("KUBECONFIG", "", "kubeconfig", None),
        ("TRUST", "signed", "trust", TrustMode.SIGNED),
        ("KEYS_DIR", "/etc/keys/", "keys_dir", "/etc/keys"),
        ("VERIFIED_SIZE", "0", "verified_size", 0),
        ("VERIFIED_SIZE", "512Mi", "verified_size", 512 << 20),
        ("SCRUB", "best-effort", "scrub", ScrubPolicy.BEST_EFFORT),
        ("RECOVERY", "rebind", "recovery", RecoveryPolicy.REBIND),
        ("RECONCILE_INTERVAL", "0.25", "reconcile_interval", 0.25),
        ("HEALTH_INTERVAL", "5", "health_interval", 5.0),
        ("HTTP_ADDRESS", "", "http_address", None),
        ("HTTP_ADDRESS", "127.0.0.1:0", "http_address", HttpAddress("127.0.0.1", 0)),
        ("HTTP_ADDRESS", "[::1]:8080", "http_address", HttpAddress("::1", 8080)),
        ("HTTP_ADDRESS", "localhost:1", "http_address", HttpAddress("localhost", 1)),
        (
            "HTTP_HOSTS",
            "Fpga.example.com, *.x.org,*",
            "http_hosts",
            ("fpga.example.com", "*.x.org", "*"),
        ),
        ("LOG_LEVEL", "debug", "log_level", LogLevel.DEBUG),
        ("LOG_FORMAT", "console", "log_format", LogFormat.CONSOLE),
        ("SIMULATED_CARDS", "1x64", "simulated_cards", (SimulatedGroup(1, 64),)),
        (
            "SIMULATED_CARDS",
            f"2x3@{OTHER_ID.upper()}, 1x1",
            "simulated_cards",
            (SimulatedGroup(2, 3, OTHER_ID), SimulatedGroup(1, 1, DEFAULT_INTERFACE_ID)),
        ),
        (
            "SIMULATED_CARDS",
            f"1x1+ofs@{OTHER_ID},1x2",
            "simulated_cards",
            (
                SimulatedGroup(1, 1, OTHER_ID, frozenset({SimulatedKind.OFS})),
                SimulatedGroup(1, 2),
            ),
        ),
        ("SIMULATED_DIR", "/run/cards", "simulated_dir", "/run/cards"),
        ("SIMULATED_PR_SECONDS", "0", "simulated_pr_seconds", 0.0),
    ],
)
def test_a_good_value_is_taken(name, text, attribute, value):
    assert getattr(load(**{name: text}), attribute) == value


def test_simulated_state_follows_the_state_directory():
    assert load(STATE_DIR="/tmp/x").simulated_dir == "/tmp/x/simulated"
    assert Settings(state_dir="/tmp/x").simulated_dir == "/tmp/x/simulated"
    assert load(STATE_DIR="/tmp/x", SIMULATED_DIR="/tmp/y").simulated_dir == "/tmp/y"


def test_node_name_has_no_prefix():
    assert load_settings({"NODE_NAME": "worker-1"}).node_name == "worker-1"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_an_empty_value_counts_as_unset_unless_it_has_a_meaning(setting):
    (changed,) = {
        field.name for field in dataclasses.fields(Settings) if setting in field.metadata.values()
    }
    loaded = getattr(load_settings({setting.name: ""}), changed)
    assert loaded == (None if setting.empty else getattr(Settings(), changed))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RESOURCE_PREFIX", "Fpga.Intel.Com"),
        ("RESOURCE_PREFIX", "fpga..com"),
        ("RESOURCE_PREFIX", "-fpga.com"),
        ("RESOURCE_PREFIX", "fpga.com/x"),
        ("RESOURCE_PREFIX", "a" * 64),
        ("RESOURCE_PREFIX", ".".join(["a" * 60] * 4) + ".ab"),  # 246: too long after "requests."
        ("RESOURCE_PREFIX", "fpga.kubernetes.io"),
        ("RESOURCE_PREFIX", "requests.fpga.com"),
        ("ADVERTISE", "none"),
        ("ADVERTISE", "BOTH"),
        ("BACKEND", "dfl "),
        ("CARDS", "3b:00.0"),
        ("CARDS", "0000:3b:00.0,"),
        ("CARDS", "0000:3b:00.0,!0000-3B-00.0"),
        ("CARDS", "all,0000:3b:00.0"),
        ("CARDS", "!all"),
        ("OBSERVE", "yes"),
        ("SYSFS_ROOT", "sys"),
        ("STATE_DIR", "/a\0b"),
        ("STATE_DIR", "/a\nb"),
        ("STATE_DIR", "/a\udcff"),
        ("STATE_DIR", "/" + "a" * 1024),
        ("SCRUB", "off"),
        ("RECOVERY", "reset"),
        ("RECONCILE_INTERVAL", "0"),
        ("RECONCILE_INTERVAL", "-1"),
        ("RECONCILE_INTERVAL", "nan"),
        ("RECONCILE_INTERVAL", "inf"),
        ("RECONCILE_INTERVAL", "1e1"),
        ("RECONCILE_INTERVAL", "1_0"),
        ("RECONCILE_INTERVAL", " 2"),
        ("RECONCILE_INTERVAL", "2\n"),
        ("RECONCILE_INTERVAL", "٢"),
        ("RECONCILE_INTERVAL", "3600.1"),
        ("HEALTH_INTERVAL", "0.001"),
        ("HTTP_ADDRESS", "9102"),
        ("HTTP_ADDRESS", ":65536"),
        ("HTTP_ADDRESS", "::1:9102"),
        ("HTTP_ADDRESS", "[host]:9102"),
        ("HTTP_ADDRESS", "[::1\0]:9102"),
        ("HTTP_ADDRESS", "http://host:1"),
        ("HTTP_HOSTS", "a,,b"),
        ("HTTP_HOSTS", "https://a.example.com"),
        ("HTTP_HOSTS", "a.example.com:443"),
        ("HTTP_HOSTS", "a.*.example.com"),
        ("CDI_DEVICES", "vendor.com/opencl=board"),
        ("CDI_DEVICES", "region=vendor.com/opencl=board"),
        ("CDI_DEVICES", "*=vendor.com/opencl"),
        ("CDI_DEVICES", "*=/dev/null"),
        ("CDI_DEVICES", "*=vendor.com/opencl=board,,*=vendor.com/x=y"),
        ("CDI_DEVICES", "*=k8s.fpga.intel.com/claim=0f1e"),
        ("LOG_LEVEL", "INFO"),
        ("LOG_FORMAT", "text"),
        ("SLOT_FUNCTIONS", "0000:3b:00.0"),
        ("SLOT_FUNCTIONS", "0000:3b:00.0="),
        ("SLOT_FUNCTIONS", "0000:3b:00.0=0000:3b:00.0"),
        ("SLOT_FUNCTIONS", "0000:3b:00.0=0000:3b:00.1,0000:3b:00.0=0000:3b:00.2"),
        ("SLOT_FUNCTIONS", "0000:3b:00.0=0000:3b:00.1,0000:5e:00.0=0000:3b:00.1"),
        ("SLOT_FUNCTIONS", "auto,0000:3b:00.0=0000:3b:00.1"),
        ("SLOT_IDENTITY", "all"),
        ("SIMULATED_CARDS", "0x3"),
        ("SIMULATED_CARDS", "2x0"),
        ("SIMULATED_CARDS", "2x65"),
        ("SIMULATED_CARDS", "4097x1"),
        ("SIMULATED_CARDS", "4000x1,97x1"),
        ("SIMULATED_CARDS", "1x1+"),
        ("SIMULATED_CARDS", "1x1+OFS"),
        ("SIMULATED_CARDS", "1x1+ofs+nonsense"),
        ("SIMULATED_CARDS", "1x2+ofs"),
        ("SIMULATED_CARDS", "2x3@"),
        ("SIMULATED_CARDS", "2x3@xyz"),
        ("SIMULATED_CARDS", "2x3\n"),
        ("SIMULATED_CARDS", ","),
        ("SIMULATED_DIR", "relative"),
        ("SIMULATED_PR_SECONDS", "601"),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_what_is_allowed(name, text):
    message = refusal(**{name: text})
    (setting,) = [setting for setting in SETTINGS if setting.name == f"FPGA_PLUGIN_{name}"]
    lines = message.splitlines()
    assert lines[0] == "a setting is wrong:"
    assert len(lines) == 2
    assert lines[1].startswith(f"{setting.name}='")
    assert lines[1].endswith(f"; allowed: {setting.allowed.replace('`', '')}")


def test_every_wrong_variable_is_named_at_once():
    environ = {setting.name: "\n" for setting in SETTINGS}
    with pytest.raises(SettingsError) as caught:
        load_settings(environ)
    first, *lines = caught.value.message.splitlines()
    assert first == f"{len(SETTINGS)} settings are wrong:"
    assert [line.partition("=")[0] for line in lines] == [setting.name for setting in SETTINGS]


def test_a_wrong_value_does_not_hide_a_misspelt_name():
    with pytest.raises(SettingsError) as caught:
        load(MODE="drs", SCRUBB="best-effort")
    _, wrong, unknown = caught.value.message.splitlines()
    assert wrong.startswith("FPGA_PLUGIN_MODE='drs'")
    assert unknown.endswith("has no effect; did you mean FPGA_PLUGIN_SCRUB?")


def test_a_long_value_is_quoted_in_part_and_not_parsed():
    message = refusal(CARDS="0000:3b:00.0," * 10_000)
    assert "longer than 8192 characters" in message
    assert len(message) < 300


@given(st.sampled_from(SETTINGS), st.text(max_size=40))
def test_any_text_is_taken_or_refused_in_one_clean_line(setting, text):
    try:
        load_settings({setting.name: text})
    except SettingsError as error:
        lines = error.message.split("\n")
        assert len(lines) == 2
        assert lines[1].isprintable()


@given(
    st.sampled_from(["CARDS", "SIMULATED_CARDS", "HTTP_ADDRESS", "RECONCILE_INTERVAL"]),
    st.text(alphabet="0123456789abcdefx@!,:.-+[] all"),
)
def test_text_that_nearly_fits_is_taken_or_refused(name, text):
    with contextlib.suppress(SettingsError):
        load(**{name: text})


def test_cards_are_selected_by_address():
    one, two = CardId("0000-3b-00.0"), CardId("0000-86-00.0")
    assert CardSelection().selects(one)
    assert load(CARDS="all").cards == CardSelection()

    only_one = load(CARDS="0000:3B:00.0, 0000:5e:00.0").cards
    assert only_one.selects(one)
    assert not only_one.selects(two)

    for text in ("!0000:3b:00.0", "all,!0000:3b:00.0"):
        not_one = load(CARDS=text).cards
        assert not not_one.selects(one)
        assert not_one.selects(two)

    both = load(CARDS="0000:86:00.0,!0000:3b:00.0").cards
    assert not both.selects(one)
    assert both.selects(two)
    assert not both.selects(CardId("0000-5e-00.0"))


def test_an_unknown_variable_is_a_warning_with_the_name_that_was_meant():
    settings = load(LOGLEVEL="debug", SOMETHING_ELSE="x")
    assert settings.log_level is LogLevel.INFO
    assert settings.warnings == (
        "unknown setting 'FPGA_PLUGIN_LOGLEVEL' has no effect; did you mean FPGA_PLUGIN_LOG_LEVEL?",
        "unknown setting 'FPGA_PLUGIN_SOMETHING_ELSE' has no effect",
    )


def test_a_hostile_name_gives_a_short_printable_warning():
    (warning,) = load_settings({"FPGA_PLUGIN_" + "\n\x1b" * 50_000: "x"}).warnings
    assert warning.isprintable()
    assert len(warning) < 150


def test_a_setting_that_is_gone_is_a_warning_that_says_what_to_do_instead():
    environ = {"FPGA_PLUGIN_DEBUG_SECONDS": "60", "FPGA_PLUGIN_WORKLOADS": "/etc/workloads.yaml"}
    settings = load_settings(environ)
    assert settings == dataclasses.replace(Settings(), warnings=settings.warnings)
    debug, workloads = settings.warnings
    assert debug.startswith("setting FPGA_PLUGIN_DEBUG_SECONDS is gone and has no effect: ")
    assert "FPGA_PLUGIN_CDI_DEVICES" in workloads


def test_many_unknown_variables_are_counted():
    warnings = load(**{f"ODD_{n}": "x" for n in range(1000)}).warnings
    assert len(warnings) == 21
    assert warnings[-1].startswith("980 more")


def test_variables_that_kubernetes_makes_of_a_service_are_no_settings():
    links = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "9102",
        "SERVICE_PORT_METRICS": "9102",
        "PORT": "tcp://10.0.0.1:9102",
        "PORT_9102_TCP": "tcp://10.0.0.1:9102",
        "PORT_9102_TCP_PROTO": "tcp",
        "PORT_9102_TCP_PORT": "9102",
        "PORT_9102_TCP_ADDR": "10.0.0.1",
        "METRICS_SERVICE_HOST": "10.0.0.2",
        "METRICS_PORT": "tcp://10.0.0.2:9102",
    }
    assert load(**links).warnings == ()
    assert len(load(HTTP_PORT="9102").warnings) == 1


def test_settings_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().observe = True  # type: ignore[misc]  # that is the test


def test_the_documentation_is_current():
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert text == config_docs.markdown(), "run `make docs`"


def test_documentation_and_help_name_every_setting_once():
    for text in (config_docs.markdown(), config_docs.help_text()):
        for setting in SETTINGS:
            assert len(re.findall(rf"(?m)^\W*{setting.name}\b", text)) == 1


@pytest.mark.parametrize(
    "text", ["2x3+alveo", "1x1+alveo+ofs", "1x1+alveo+no-pr", "1x1+alveo+fixed-clock"]
)
def test_an_alveo_card_has_one_region_and_is_of_no_other_kind(text: str):
    with pytest.raises(SettingsError, match="SIMULATED_CARDS"):
        load_settings({"FPGA_PLUGIN_SIMULATED_CARDS": text})


def test_several_kinds_of_simulated_cards_may_be_mixed():
    groups = load_settings(
        {"FPGA_PLUGIN_SIMULATED_CARDS": "2x3,2x1+alveo,1x1+alveo+no-iommu@" + "5b" * 16}
    ).simulated_cards
    assert [(g.cards, g.regions, sorted(g.kinds)) for g in groups] == [
        (2, 3, []),
        (2, 1, ["alveo"]),
        (1, 1, ["alveo", "no-iommu"]),
    ]


def test_tenants_loads_exclude_signed_images():
    env = {"FPGA_PLUGIN_XRT_TENANT_LOADS": "true", "FPGA_PLUGIN_TRUST": "signed"}
    with pytest.raises(SettingsError, match="XRT_TENANT_LOADS"):
        load_settings(env)
    load_settings(env | {"FPGA_PLUGIN_TRUST": "digest"})
