"""Every setting, read from the environment and checked in one place.

The fields of `Settings` are the table: each carries its variable's name, its default, the parser,
what is allowed and what it means. Validation, `fpga-plugin run --help` and `docs/configuration.md`
(both by way of `settings.docs`) come from it, so they cannot differ.

An empty value counts as unset, as a template leaves it; only where the table says what empty means
(it switches something off) does it mean that.
"""

# ruff: noqa: RUF009  # the calls in the dataclass make its table; their values are immutable

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, TypeVar, cast

from fpga_plugin.errors import SettingsError, quote
from fpga_plugin.ids import CardId
from fpga_plugin.settings.service_links import is_service_link
from fpga_plugin.settings.values import (
    DEFAULT_INTERFACE_ID,
    MAX_SIMULATED_CARDS,
    MAX_SIMULATED_REGIONS,
    MAX_VALUE,
    Advertise,
    BackendKind,
    CardSelection,
    CdiDevices,
    Exposure,
    HttpAddress,
    LogFormat,
    LogLevel,
    RecoveryPolicy,
    SandboxMode,
    ScrubPolicy,
    ServedApi,
    SimulatedGroup,
    SimulatedKind,
    SlotFunctions,
    TrustMode,
    UnknownVariables,
    allowed_words,
    choice,
    parse_bool,
    parse_card_list,
    parse_cards,
    parse_cdi_devices,
    parse_http_address,
    parse_http_hosts,
    parse_namespaces,
    parse_neighbours,
    parse_path,
    parse_resource_prefix,
    parse_simulated_cards,
    parse_size,
    parse_slot_functions,
    parse_subdomain,
    seconds,
)

__all__ = [
    "DEFAULT_INTERFACE_ID",
    "PREFIX",
    "SETTINGS",
    "Advertise",
    "BackendKind",
    "CardSelection",
    "CdiDevices",
    "Exposure",
    "HttpAddress",
    "LogFormat",
    "LogLevel",
    "RecoveryPolicy",
    "SandboxMode",
    "ScrubPolicy",
    "ServedApi",
    "Setting",
    "Settings",
    "SimulatedGroup",
    "SimulatedKind",
    "TrustMode",
    "UnknownVariables",
    "defaults",
    "load_settings",
]

T = TypeVar("T")

PREFIX: Final = "FPGA_PLUGIN_"
"""What the names of all variables but NODE_NAME begin with."""

_MAX_WARNINGS = 20
_MAX_COMPARED = 64

_METADATA = "setting"
_SWITCHED_OFF: Final = "switched off"
_NO_VALUE: Final = "no value"

_GONE: Final = {
    f"{PREFIX}DEBUG_SECONDS": "the annotation says for how long a region is kept, at most an hour",
    f"{PREFIX}HOST_PATHS": "name CDI devices in FPGA_PLUGIN_CDI_DEVICES (docs/workloads.md)",
    f"{PREFIX}RUNBOOK_URL": "the page names the parts of docs/runbook.md",
    f"{PREFIX}WORKLOADS": "name CDI devices in FPGA_PLUGIN_CDI_DEVICES (docs/workloads.md)",
}
"""Settings of former versions, and what stands in their place."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable.

    Attributes:
        name: of the variable.
        default: its text when the variable is unset; empty: there is none.
        parse: turns the text into the value, or raises ValueError.
        allowed: what may be written, for people.
        meaning: one or two sentences, for people.
        empty: what an empty value means, for people; empty: it counts as unset.
        default_text: the default for people, where it is not `default` itself.
    """

    name: str
    default: str
    parse: Callable[[str], object]
    allowed: str
    meaning: str
    empty: str = ""
    default_text: str = ""

    def value(self, text: str) -> object:
        """The value of a text; None for an empty one.

        Raises:
            ValueError: what is wrong with it.
        """
        if len(text) > MAX_VALUE:
            raise ValueError(f"longer than {MAX_VALUE} characters")
        return self.parse(text) if text else None


def _setting(
    name: str,
    default: str,
    parse: Callable[[str], T],
    allowed: str,
    meaning: str,
) -> T:
    """A field that always has a value."""
    return cast("T", _field(Setting(name, default, parse, allowed, meaning)))


def _optional(
    name: str,
    default: str,
    parse: Callable[[str], T],
    allowed: str,
    meaning: str,
    *,
    empty: str = _NO_VALUE,
) -> T | None:
    """A field that is None when the variable is empty."""
    return cast("T", _field(Setting(name, default, parse, allowed, meaning, empty)))


def _field(setting: Setting) -> object:
    return field(default=setting.value(setting.default), metadata={_METADATA: setting})


_PATH: Final = "an absolute path"
_OR_EMPTY: Final = f"{_PATH}, or empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The plugin's settings; `Settings()` is what an empty environment gives.

    The attributes mean what the table says of their variables. None: switched off, or not known.
    """

    mode: ServedApi = _setting(
        "FPGA_PLUGIN_MODE",
        "device-plugin",
        choice(ServedApi),
        allowed_words(ServedApi),
        "Which API gives pods devices: the device plugin API, or Dynamic Resource Allocation"
        " (docs/dra.md). A node serves one of them.",
    )
    resource_prefix: str = _setting(
        "FPGA_PLUGIN_RESOURCE_PREFIX",
        "fpga.intel.com",
        parse_resource_prefix,
        "a DNS subdomain in lower case",
        "Domain of the resources: `<prefix>/region-<interface id>` for a region, "
        "`<prefix>/fpga-<interface id>` for a whole card. Pods keep devices under the prefix that "
        "was set before (docs/upgrade.md).",
    )
    xrt_resource_prefix: str = _setting(
        "FPGA_PLUGIN_XRT_RESOURCE_PREFIX",
        "fpga.amd.com",
        parse_resource_prefix,
        "a DNS subdomain in lower case",
        "Domain of the resources of Alveo cards. With DRA all cards are one driver's.",
    )
    xrt_shell_resources: bool = _setting(
        "FPGA_PLUGIN_XRT_SHELL_RESOURCES",
        "false",
        parse_bool,
        "true or false, 1 or 0",
        "Name the resources of Alveo cards as AMD's own plugin does, one for each shell, in place "
        "of the others: `amd.com/xilinx_u55c_gen3x16_xdma_base_3-0` (docs/alveo.md).",
    )
    xrt_tenant_loads: bool = _setting(
        "FPGA_PLUGIN_XRT_TENANT_LOADS",
        "false",
        parse_bool,
        "true or false, 1 or 0",
        "Whether a container with an Alveo card that names no bitstream may load its own xclbin. "
        "Such containers are trusted with the node (docs/alveo.md). The policy says who may, by "
        "`blank`. Refused where only signed bitstreams are trusted.",
    )
    advertise: Advertise = _setting(
        "FPGA_PLUGIN_ADVERTISE",
        "both",
        choice(Advertise),
        allowed_words(Advertise),
        "Advertise each card's regions, each card as a whole, or both. `af`: advertise regions by "
        "the accelerator functions on them, and program nothing (docs/functions.md).",
    )
    interface_aliases: bool = _setting(
        "FPGA_PLUGIN_INTERFACE_ALIASES",
        "false",
        parse_bool,
        "true or false, 1 or 0",
        "Name resources by the manifest's names of interface ids, `<prefix>/region-<alias>`, in"
        " place of the ids (docs/bitstreams.md).",
    )
    backend: BackendKind = _setting(
        "FPGA_PLUGIN_BACKEND",
        "auto",
        choice(BackendKind),
        allowed_words(BackendKind),
        "Which hardware to drive. `auto` is what the node has; it never means simulated cards.",
    )
    cards: CardSelection = _setting(
        "FPGA_PLUGIN_CARDS",
        "all",
        parse_cards,
        "`all`, or PCI addresses separated by commas; `!address` leaves a card out",
        "Cards to serve. The others are not touched.",
    )
    neighbours: tuple[tuple[CardId, ...], ...] | None = _optional(
        "FPGA_PLUGIN_NEIGHBOURS",
        "",
        parse_neighbours,
        "`<card>+<card>[+<card>...]`, several separated by commas, or empty",
        "Cards that are cabled to each other, each ring in its order. A pod that asks for several "
        "devices gets neighbours where enough are free, whatever their NUMA nodes. Only with the "
        "device plugin API.",
        empty="none",
    )
    slot_functions: SlotFunctions = _setting(
        "FPGA_PLUGIN_SLOT_FUNCTIONS",
        "auto",
        parse_slot_functions,
        "`auto`, or `<card>=<function>[+<function>...]`, several separated by commas",
        "The PCI functions that hold an OFS card's AFU. `auto`: all virtual functions of the card."
        " Name them here for a card that can have none. Containers get these functions and no"
        " others. Never name a static function of the FIM.",
    )
    slot_identity: frozenset[CardId] | None = _optional(
        "FPGA_PLUGIN_SLOT_IDENTITY",
        "",
        parse_card_list,
        "PCI addresses separated by commas, or empty",
        "OFS cards whose functions may be in an IOMMU group of type identity (`iommu=pt`). VFIO "
        "translates while a container has them, and nothing does in between.",
        empty="none",
    )
    observe: bool = _setting(
        "FPGA_PLUGIN_OBSERVE",
        "false",
        parse_bool,
        "true or false, 1 or 0",
        "Discover cards and report what would be done, but touch and register nothing.",
    )
    sysfs_root: str = _setting(
        "FPGA_PLUGIN_SYSFS_ROOT",
        "/sys",
        parse_path,
        _PATH,
        "Where the kernel's sysfs is mounted.",
    )
    dev_root: str = _setting(
        "FPGA_PLUGIN_DEV_ROOT",
        "/dev",
        parse_path,
        _PATH,
        "Where the node's device nodes are.",
    )
    cgroup_root: str | None = _optional(
        "FPGA_PLUGIN_CGROUP_ROOT",
        "/sys/fs/cgroup",
        parse_path,
        _OR_EMPTY,
        "Where the pods' cgroups (v1 or v2) are. They show that a pod's processes are gone.",
        empty="the plugin relies on kubelet instead",
    )
    kubelet_dir: str = _setting(
        "FPGA_PLUGIN_KUBELET_DIR",
        "/var/lib/kubelet/device-plugins",
        parse_path,
        _PATH,
        "Directory of kubelet.sock, of kubelet's checkpoint and of the plugin's own sockets.",
    )
    kubelet_root: str = field(
        default="",  # follows kubelet's device plugin directory: see __post_init__
        metadata={
            _METADATA: Setting(
                "FPGA_PLUGIN_KUBELET_ROOT",
                "",
                parse_path,
                _PATH,
                "Kubelet's root directory (its `--root-dir`), with `plugins_registry` and `plugins`"
                " in it. In a container it has to be mounted at the same path.",
                default_text="the parent of FPGA_PLUGIN_KUBELET_DIR",
            )
        },
    )
    cdi_dir: str = _setting(
        "FPGA_PLUGIN_CDI_DIR",
        "/var/run/cdi",
        parse_path,
        _PATH,
        "Where the container runtime looks for CDI files that are made at run time; only with "
        "`FPGA_PLUGIN_MODE=dra`.",
    )
    podresources_socket: str | None = _optional(
        "FPGA_PLUGIN_PODRESOURCES_SOCKET",
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        parse_path,
        _OR_EMPTY,
        "Kubelet's PodResources API.",
        empty=_SWITCHED_OFF,
    )
    pods_socket: str | None = _optional(
        "FPGA_PLUGIN_PODS_SOCKET",
        "/var/lib/kubelet/pods-api/pods-api.sock",
        parse_path,
        _OR_EMPTY,
        "Kubelet's Pods API, where it is served.",
        empty=_SWITCHED_OFF,
    )
    kubeconfig: str | None = _optional(
        "FPGA_PLUGIN_KUBECONFIG",
        "",
        parse_path,
        _OR_EMPTY,
        "Credentials for the API server.",
        empty="the pod's service account",
    )
    bitstream_dir: str = _setting(
        "FPGA_PLUGIN_BITSTREAM_DIR",
        "/srv/intel.com/fpga",
        parse_path,
        _PATH,
        "The store of bitstreams (docs/bitstreams.md).",
    )
    trust: TrustMode = _setting(
        "FPGA_PLUGIN_TRUST",
        "any",
        choice(TrustMode),
        allowed_words(TrustMode),
        "Which bitstreams may be programmed: every valid file, those that the store's "
        "manifest.json names, or those of a signed manifest (docs/bitstreams.md). In every mode, "
        "what the manifest names must match it.",
    )
    keys_dir: str | None = _optional(
        "FPGA_PLUGIN_KEYS_DIR",
        "",
        parse_path,
        _OR_EMPTY,
        "Directory of the Ed25519 public keys (`*.pem`) that signatures are checked against.",
        empty="no keys, so that `signed` trusts nothing",
    )
    verified_size: int = _setting(
        "FPGA_PLUGIN_VERIFIED_SIZE",
        "4Gi",
        parse_size,
        "bytes, or a number with Ki, Mi, Gi or Ti",
        "How large all verified copies of bitstreams in the state directory may be together.",
    )
    policy_file: str | None = _optional(
        "FPGA_PLUGIN_POLICY_FILE",
        "",
        parse_path,
        _OR_EMPTY,
        "Which namespaces may use which bitstreams, interface ids and whole cards "
        "(docs/policy.md). Read again when it changes.",
        empty="everything is allowed",
    )
    unknown_variables: UnknownVariables = _setting(
        "FPGA_PLUGIN_UNKNOWN_VARIABLES",
        "warn",
        choice(UnknownVariables),
        allowed_words(UnknownVariables),
        "What to do about a container with an FPGA and a variable FPGA_* that means nothing, such"
        " as FPGA_REGON_1. `warn`: report it. `refuse`: the container does not start.",
    )
    debug_namespaces: tuple[str, ...] | None = _optional(
        "FPGA_PLUGIN_DEBUG_NAMESPACES",
        "",
        parse_namespaces,
        "names of namespaces separated by commas, `*` for every one, or empty",
        "Namespaces whose pods may have the annotation `<prefix>/debug`. If such a pod's container "
        "fails, a debug hold keeps its region as it is for a time (docs/runbook.md).",
        empty="the annotation has no effect",
    )
    cdi_devices: CdiDevices | None = _optional(
        "FPGA_PLUGIN_CDI_DEVICES",
        "",
        parse_cdi_devices,
        "`<resource>=<vendor>/<class>=<device>`, several separated by commas, or empty",
        "CDI devices that containers get beside their FPGAs (docs/workloads.md). The resource is "
        "`region-<interface id>` or such, or `*` for every resource. It may stand several times.",
        empty="none",
    )
    state_dir: str = _setting(
        "FPGA_PLUGIN_STATE_DIR",
        "/var/lib/fpga-plugin",
        parse_path,
        _PATH,
        "Journal, lock and verified copies of bitstreams. It has to outlive the plugin's pod, and "
        "nobody but root may write to it.",
    )
    scrub: ScrubPolicy = _setting(
        "FPGA_PLUGIN_SCRUB",
        "required",
        choice(ScrubPolicy),
        allowed_words(ScrubPolicy),
        "`required`: a region without a blank bitstream is Unhealthy. `best-effort`: it is reset "
        "and given out, with the last tenant's image still in it.",
    )
    uncleared_memory: Exposure = _setting(
        "FPGA_PLUGIN_UNCLEARED_MEMORY",
        "allow",
        choice(Exposure),
        allowed_words(Exposure),
        "Who gets a card whose driver cannot clear its on-card memory between two pods (`memory:"
        " never cleared`). `allow`: every pod. `refuse-regions`: only pods that ask for the whole"
        " card. `refuse`: no pod. Pods that have such a device keep it.",
    )
    untranslated_dma: Exposure = _setting(
        "FPGA_PLUGIN_UNTRANSLATED_DMA",
        "allow",
        choice(Exposure),
        allowed_words(Exposure),
        "Who gets a card that reaches all of the node's memory (`IOMMU: none`, `identity` or"
        " `unknown`), or other devices in its IOMMU group (`shared`). The values are those of"
        " FPGA_PLUGIN_UNCLEARED_MEMORY.",
    )
    recovery: RecoveryPolicy = _setting(
        "FPGA_PLUGIN_RECOVERY",
        "none",
        choice(RecoveryPolicy),
        allowed_words(RecoveryPolicy),
        "Whether the plugin may rebind a card's PCI driver when a failed PR left a port unusable.",
    )
    sandbox: SandboxMode = _setting(
        "FPGA_PLUGIN_SANDBOX",
        "auto",
        choice(SandboxMode),
        allowed_words(SandboxMode),
        "`auto`: the plugin gives up the system calls (seccomp) and files (Landlock) that it does"
        " not need, as far as the kernel can. `off`: for kernels where that fails, and for a"
        " kubeconfig that runs a program.",
    )
    reconcile_interval: float = _setting(
        "FPGA_PLUGIN_RECONCILE_INTERVAL",
        "2",
        seconds(0.01, 3600),
        "seconds, 0.01 to 3600",
        "How often kubelet's records are compared with the plugin's own while devices are in use.",
    )
    health_interval: float = _setting(
        "FPGA_PLUGIN_HEALTH_INTERVAL",
        "30",
        seconds(0.01, 3600),
        "seconds, 0.01 to 3600",
        "How often the hardware's signals are read for which the kernel sends no event.",
    )
    http_address: HttpAddress | None = _optional(
        "FPGA_PLUGIN_HTTP_ADDRESS",
        ":9102",
        parse_http_address,
        "`host:port`, `:port`, `[IPv6 address]:port`, or empty",
        "Where /metrics, /healthz and /readyz are served. Port 0 takes any free one.",
        empty=_SWITCHED_OFF,
    )
    http_hosts: tuple[str, ...] | None = _optional(
        "FPGA_PLUGIN_HTTP_HOSTS",
        "",
        parse_http_hosts,
        "names separated by commas; `*.<domain>` stands for all names below it, `*` for every name",
        "Further names by which FPGA_PLUGIN_HTTP_ADDRESS may be asked, for example an Ingress's. "
        "Addresses, the node's and the pod's own names, names without a dot, and names under "
        "`.svc`, `.local` and `.internal` need not be listed. A request for another Host gets 421, "
        "against DNS rebinding.",
        empty="no further ones",
    )
    status_page: bool = _setting(
        "FPGA_PLUGIN_STATUS_PAGE",
        "false",
        parse_bool,
        "true or false, 1 or 0",
        "Show cards, regions and the pods that have them as a page at / beside /metrics, and as "
        "/status.json. Anybody who reaches that address sees pods' names.",
    )
    events: bool = _setting(
        "FPGA_PLUGIN_EVENTS",
        "false",
        parse_bool,
        "true or false, 1 or 0",
        "Post a Kubernetes Event on the pod when programming is refused or fails, and on the node "
        "when a card fails or recovers. Needs `create` and `patch` on events.k8s.io events, and "
        "16 MiB of memory.",
    )
    log_level: LogLevel = _setting(
        "FPGA_PLUGIN_LOG_LEVEL",
        "info",
        choice(LogLevel),
        allowed_words(LogLevel),
        "The least serious event that is logged.",
    )
    log_format: LogFormat = _setting(
        "FPGA_PLUGIN_LOG_FORMAT",
        "json",
        choice(LogFormat),
        allowed_words(LogFormat),
        "`json` for machines, `console` for people; to standard error.",
    )
    simulated_cards: tuple[SimulatedGroup, ...] = _setting(
        "FPGA_PLUGIN_SIMULATED_CARDS",
        "2x3",
        parse_simulated_cards,
        "`<cards>x<regions>[+<kind>][@<interface id>]`, several separated by commas; at most "
        f"{MAX_SIMULATED_CARDS} cards in total, {MAX_SIMULATED_REGIONS} regions each; kinds: "
        f"{', '.join(SimulatedKind)}",
        "The simulated cards of a node, each like a PAC A10 but for its kinds. The interface id is "
        f"{DEFAULT_INTERFACE_ID} unless given.",
    )
    simulated_dir: str = field(
        default="",  # follows the state directory: see __post_init__
        metadata={
            _METADATA: Setting(
                "FPGA_PLUGIN_SIMULATED_DIR",
                "",
                parse_path,
                _PATH,
                "The simulated cards' own state, which outlives the daemon.",
                default_text="`<state dir>/simulated`",
            )
        },
    )
    simulated_pr_seconds: float = _setting(
        "FPGA_PLUGIN_SIMULATED_PR_SECONDS",
        "0.05",
        seconds(0, 600),
        "seconds, 0 to 600",
        "How long a simulated partial reconfiguration takes.",
    )
    node_name: str | None = _optional(
        "NODE_NAME",
        "",
        parse_subdomain,
        "a node's name",
        "The node's name in Kubernetes, from the downward API.",
        empty="not known",
    )
    warnings: tuple[str, ...] = ()
    """What is odd in the environment without being wrong, one sentence each; to be logged."""
    given: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """The variables that were set, with their texts; to be logged. None of them is a secret."""

    @property
    def prefixes(self) -> Mapping[str, str]:
        """The domains of resources of those families of cards that have one of their own."""
        return {"xrt": self.xrt_resource_prefix}

    def prefix_of(self, family: str) -> str:
        """The domain of resources of a family of cards."""
        return self.prefixes.get(family, self.resource_prefix)

    def __post_init__(self) -> None:
        """Directories that follow others unless they were given."""
        if not self.simulated_dir:
            object.__setattr__(self, "simulated_dir", f"{self.state_dir.rstrip('/')}/simulated")
        if not self.kubelet_root:
            object.__setattr__(
                self, "kubelet_root", os.path.dirname(self.kubelet_dir.rstrip("/")) or "/"
            )


_TABLE: Final[dict[str, Setting]] = {
    entry.name: entry.metadata[_METADATA] for entry in fields(Settings) if entry.metadata
}

SETTINGS: Final[tuple[Setting, ...]] = tuple(_TABLE.values())
"""All settings, in the order of the documentation."""


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Read all settings from an environment.

    Raises:
        SettingsError: names every wrong variable, its value and what is allowed, one a line; then
            the unknown ones, which may be the wrong ones' names misspelt.
    """
    values: dict[str, object] = {}
    wrong: list[str] = []
    used: list[Setting] = []
    for attribute, setting in _TABLE.items():
        text = environ.get(setting.name)
        if text is None or (not text and not setting.empty):
            continue
        used.append(setting)
        try:
            values[attribute] = setting.value(text)
        except ValueError as error:
            allowed = setting.allowed.replace("`", "")
            wrong.append(f"{setting.name}={quote(text)}: {error}; allowed: {allowed}")
    if wrong:
        what = "a setting is wrong" if len(wrong) == 1 else f"{len(wrong)} settings are wrong"
        raise SettingsError(
            "\n".join([f"{what}:", *wrong, *_warnings(environ)]),
            hint="`fpga-plugin run --help` and docs/configuration.md describe every setting",
        )
    signed = values.get("trust") is TrustMode.SIGNED
    if signed and values.get("xrt_tenant_loads"):
        raise SettingsError(
            f"{PREFIX}XRT_TENANT_LOADS='true' and {PREFIX}TRUST='signed' exclude each other: what a"
            " tenant brings has no signature that the plugin could look at",
            hint="set one of them otherwise (docs/alveo.md)",
        )
    # The parsers' types were checked against the fields' where the table was written.
    given = tuple((setting.name, environ[setting.name]) for setting in used)
    return Settings(warnings=_warnings(environ), given=given, **values)  # type: ignore[arg-type]


def defaults(settings: Settings) -> dict[str, str]:
    """The settings that were not given, and the default of each; to be logged."""
    given = dict(settings.given)
    return {
        setting.name: setting.default or setting.default_text.replace("`", "")
        for setting in SETTINGS
        if setting.name not in given
    }


def _warnings(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = [setting.name for setting in SETTINGS]
    unknown = sorted(
        name
        for name, value in environ.items()
        if name.startswith(PREFIX)
        and name not in known
        and not is_service_link(name, value, prefix=PREFIX)
    )
    warnings = [_unknown(name, known) for name in unknown[:_MAX_WARNINGS]]
    if rest := len(unknown) - len(warnings):
        warnings.append(f"{rest} more unknown {PREFIX}* variables have no effect")
    return tuple(warnings)


def _unknown(name: str, known: list[str]) -> str:
    if name in _GONE:
        return f"setting {name} is gone and has no effect: {_GONE[name]}"
    import difflib  # needed for a mistake only; costs 5 ms of the start

    warning = f"unknown setting {quote(name)} has no effect"
    # The prefix, which all have, would make everything look alike. Names far longer than any
    # setting's resemble none; comparing them would only cost time.
    bare = {setting.removeprefix(PREFIX): setting for setting in known}
    wanted = name.removeprefix(PREFIX)
    near = difflib.get_close_matches(wanted, bare, 1) if len(wanted) <= _MAX_COMPARED else []
    return f"{warning}; did you mean {bare[near[0]]}?" if near else warning
