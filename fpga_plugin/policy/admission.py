"""The policy as a ValidatingAdmissionPolicy: what would be refused at PreStart is not even created.

Made from the same `Policy`, so that there is one source of the rules; the plugin's own check stays
the one that counts. CEL sees a pod's spec as it is written and not the values that kubelet makes of
it. A container hides a request when a request variable has a `valueFrom` of any kind or a `$` in
its value, or when an `envFrom` may define one, whatever its `env` names beside that: the ConfigMap
or Secret may add a second request, or be written later. A hidden request is refused, unless there
is nothing that it could be refused for: the first rule that could match allows every bitstream. So
is one by a name: which bitstream that is, each node's store says. Preprogrammed functions are left
to the plugin: no expression can read the ids in their resources' names. So are resources with an
alias in place of the interface id: which id that is, each node's store says.
Apart from that the admission policy decides as `Policy.judge` does, or more strictly where a pod is
malformed and fails at PreStart anyway.

The rules are data in one variable, not code: however many there are, the expressions stay the same.
CEL is that of Kubernetes 1.30 (admissionregistration.k8s.io/v1); literals must be of one type,
so every field of a rule is a list of strings, and `*` stands for everything.
"""

import json
from typing import Any, Final

from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import ResourceKind
from fpga_plugin.policy.rules import Action, Policy, pattern_regex

_ANY: Final = "*"
_BLANK: Final = "blank"
_HIDDEN: Final = "?"

_ID: Final = "^[0-9a-f]{32}([0-9a-f]{8})?$"
"""A bitstream's id in the form of the rules; RE2."""

MAX_EXPRESSION: Final = 90_000
"""Characters of one expression; the API server's parser takes 100 000."""

_KINDS: Final = ("FPGA_REGION_", "FPGA_BITSTREAM_ID_", "FPGA_AFU_")
"""What the names of variables begin with that the policy is asked about; it knows no parameters."""

_REQUEST: Final = "(" + " || ".join(f"e.name.startsWith('{kind}')" for kind in _KINDS) + ")"
_NAMES_BITSTREAM: Final = (
    "(e.name.startsWith('FPGA_BITSTREAM_ID_') || e.name.startsWith('FPGA_AFU_'))"
)
_SUFFIX: Final = (
    "e.name.substring(e.name.startsWith('FPGA_AFU_') ?"
    f" {len('FPGA_AFU_')} : {len('FPGA_BITSTREAM_ID_')})"
)


def _normal(variable: str) -> str:
    """An id as it is written, in the form of the rules."""
    return f"(has({variable}.value) ? {variable}.value.lowerAscii().replace('-', '') : '')"


def admission_policy(
    policy: Policy, *, prefix: str, name: str = "fpga-plugin-policy"
) -> list[dict[str, Any]]:
    """The ValidatingAdmissionPolicy and its binding, as objects of the API.

    Args:
        policy: to be rendered.
        prefix: domain of the plugin's resources.
        name: of both objects.

    Raises:
        RefusedError: the policy is too large for one expression.
    """
    rules = "[" + ", ".join(_rule(rule) for rule in _rows(policy)) + "]"
    if len(rules) > MAX_EXPRESSION:
        raise RefusedError(
            f"the policy makes an expression of {len(rules)} characters, and the API server takes"
            f" {MAX_EXPRESSION} at most",
            hint="use fewer rules or patterns; the plugin itself takes the policy as it is",
        )
    asks = f"c.resources.limits.exists(k, {_is_ours(prefix)})"
    limits = "has(c.resources) && has(c.resources.limits)"
    spec: dict[str, Any] = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["pods"],
                }
            ]
        },
        "matchConditions": [
            {
                "name": "asks-for-an-fpga",
                "expression": f"object.spec.containers.exists(c, {limits} && {asks})"
                " || (has(object.spec.initContainers) &&"
                f" object.spec.initContainers.exists(c, {limits} && {asks}))",
            }
        ],
        "variables": [
            {"name": "rules", "expression": rules},
            {
                "name": "mine",
                "expression": "variables.rules.filter(r,"
                " r.namespaces.exists(n, request.namespace.matches(n)))",
            },
            {
                "name": "containers",
                "expression": "object.spec.containers"
                " + (has(object.spec.initContainers) ? object.spec.initContainers : [])",
            },
            {"name": "refusals", "expression": _refusals(prefix)},
        ],
        "validations": [
            {
                "expression": "variables.refusals == ''",
                "message": "the FPGA policy refuses this pod",
                "messageExpression": "'the FPGA policy refuses this pod: ' + variables.refusals",
                "reason": "Forbidden",
            }
        ],
    }
    api = "admissionregistration.k8s.io/v1"
    return [
        {
            "apiVersion": api,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": spec,
        },
        {
            "apiVersion": api,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]


def not_applied(policy: Policy) -> list[str]:
    """Names of the rules that are about preprogrammed functions by their `devices`."""
    return [r.name for r in policy.rules if r.devices is not None and ResourceKind.AF in r.devices]


def _is_ours(prefix: str) -> str:
    stems = f"(k.startsWith('{prefix}/region-') || k.startsWith('{prefix}/fpga-'))"
    return f"({stems} && k.matches('-[0-9a-f]{{32}}$'))"


def _rows(policy: Policy) -> list[dict[str, list[str]]]:
    """The rules as the expressions read them; the default is the last one, without a name."""
    rows = [
        {
            "name": [rule.name],
            "action": [rule.action.value],
            "namespaces": [f"^({pattern_regex(rule.namespaces)})$"],
            "interfaces": _words(rule.interfaces),
            "bitstreams": _words(rule.bitstreams),
            "devices": _words(
                None if rule.devices is None else {kind.value for kind in rule.devices}
            ),
        }
        for rule in policy.rules
    ]
    everything = [_ANY]
    default = Action(policy.default).value
    rows.append(
        {
            "name": [""],
            "action": [default],
            "namespaces": ["^.*$"],
            "interfaces": everything,
            "bitstreams": everything,
            "devices": everything,
        }
    )
    return rows


def _words(values: Any) -> list[str]:
    if values is None:
        return [_ANY]
    return sorted(_BLANK if value is None else str(value) for value in values)


def _rule(row: dict[str, list[str]]) -> str:
    """A literal of CEL; nothing in a policy needs escapes that JSON and CEL have not in common."""
    return json.dumps(row, separators=(",", ":"))


def _refusals(prefix: str) -> str:
    """What is refused and by which rule, container by container; empty: nothing."""
    region, whole = ResourceKind.REGION.value, ResourceKind.WHOLE.value
    kind = f"(k.startsWith('{prefix}/region-') ? '{region}' : '{whole}')"
    interface = (
        f"k.substring(k.startsWith('{prefix}/region-') ?"
        f" {len(prefix) + len('/region-')} : {len(prefix) + len('/fpga-')})"
    )
    # The name of a variable that comes by `envFrom` is its prefix with a key behind it.
    may_define = "||".join(
        f" '{kind}'.startsWith(s.prefix) || s.prefix.startsWith('{kind}') " for kind in _KINDS
    ).strip()
    hidden = (
        f"((has(c.env) && c.env.exists(e, {_REQUEST} && (has(e.value) && e.value != ''"
        " ? e.value.contains('$') : has(e.valueFrom))))"
        f" || (has(c.envFrom) && c.envFrom.exists(s, !has(s.prefix) || {may_define})))"
    )
    requested = (
        f"c.env.filter(e, {_NAMES_BITSTREAM} && c.env.exists(f,"
        f" f.name == 'FPGA_REGION_' + {_SUFFIX} && {_normal('f')} == {interface}))"
        f".map(e, {_normal('e')}).map(v, v.matches('{_ID}') ? v : '{_HIDDEN}')"
    )
    any_request = f"(has(c.env) && c.env.exists(e, {_REQUEST}))"
    asks = f"({hidden} ? ['{_HIDDEN}'] : ({any_request} ? {requested} : ['{_BLANK}']))"
    matching = (
        "variables.mine.filter(r,"
        f" ('{_ANY}' in r.devices || {kind} in r.devices)"
        f" && ('{_ANY}' in r.interfaces || {interface} in r.interfaces)"
        f" && (a == '{_HIDDEN}' || '{_ANY}' in r.bitstreams || a in r.bitstreams))"
    )
    what = (
        f"(a == '{_BLANK}' ? 'no bitstream' : a == '{_HIDDEN}' ?"
        " 'a bitstream that its env does not spell out' : 'bitstream ' + a)"
    )
    who = (
        "(m[0].name[0] == '' ? 'no rule allows it and the default is deny'"
        " : 'rule ' + m[0].name[0] + ' ' + (m[0].action[0] == 'deny' ? 'denies it' :"
        " 'needs it written out'))"
    )
    verdict = (
        f"[{matching}].map(m, m[0].action[0] == 'allow'"
        f" && (a != '{_HIDDEN}' || '{_ANY}' in m[0].bitstreams) ? '' :"
        f" 'container ' + c.name + ': ' + k + ' with ' + {what} + ': ' + {who})[0]"
    )
    joined = ".filter(s, s != '').join('; ')"
    return (
        "variables.containers.filter(c, has(c.resources) && has(c.resources.limits)).map(c,"
        f" c.resources.limits.filter(k, {_is_ours(prefix)}).map(k,"
        f" {asks}.map(a, {verdict}){joined}){joined}){joined}"
    )
