"""The kinds of value of which an InferenceDeployment is made, each with its CEL rules and the same checks in Python.

The values are checked here too for the places without an API server: `weir-operator local` and `plan` read plain files.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from weir_operator.api.names import CONTAINER
from weir_operator.api.quantity import DURATION_PATTERN, parse_bytes, parse_duration

Rule = tuple[str, str]
"""A CEL expression and the sentence that a user reads where it is false."""


def rules(*found: Rule) -> dict[str, Any]:
    """For `json_schema_extra`."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in found]}


class Part(BaseModel):
    """An object of the manifest. A field's docstring becomes its description (`kubectl explain`)."""

    model_config = ConfigDict(
        populate_by_name=True, extra="forbid", frozen=True, use_attribute_docstrings=True,
        alias_generator=lambda name: (words := name.rstrip("_").split("_"))[0] + "".join(w.title() for w in words[1:]),
    )


def _checked(parse: Any) -> AfterValidator:
    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    _checked(parse_bytes),
    WithJsonSchema({
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "maxLength": 32,
        **rules((
            "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
            "must be a positive quantity of bytes, such as 512Mi, 2Gi or 1.5G",
        )),
    }),
]
"""Bytes as Kubernetes writes them; kept as the user wrote them."""

_DURATION_RULE = (
    f"self.matches('^{DURATION_PATTERN}$') && duration(self) > duration('0s')",
    "must be a duration above zero, such as 80ms, 2s or 1m30s",
)
Duration = Annotated[
    str, _checked(parse_duration), WithJsonSchema({"type": "string", "maxLength": 32, **rules(_DURATION_RULE)}),
]
"""A time as Go writes it; kept as the user wrote it."""


def up_to(most: str) -> Any:
    """A duration of at most `most`."""
    def check(text: str) -> None:
        if parse_duration(text) > parse_duration(most):
            raise ValueError(f"must not exceed {most}")

    rule = f"!self.matches('^{DURATION_PATTERN}$') || duration(self) <= duration('{most}')"
    schema = {"type": "string", "maxLength": 32, **rules(_DURATION_RULE, (rule, f"must not exceed {most}"))}
    return Annotated[str, _checked(check), WithJsonSchema(schema)]


_PODS = "must be a number of pods or a percentage, such as 1 or 25%"


def _pods(value: int | str) -> None:
    number = value if isinstance(value, int) else int(value[:-1]) if re.fullmatch("[0-9]{1,3}%", value) else -1
    if number < 0 or (isinstance(value, str) and number > 100):
        raise ValueError(_PODS)


Pods = Annotated[int | str, _checked(_pods), WithJsonSchema({
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "maxLength": 4,
    **rules(("type(self) == int ? self >= 0 : string(self).matches('^([0-9]|[1-9][0-9]|100)%$')", _PODS)),
})]
"""A number of pods, or a share of them in percent."""

_REPOSITORY = "[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
SOURCE_PATTERN = (
    r"(package://[A-Za-z0-9._-]+/[^/].*|file:///.+|pvc://[a-z0-9.-]+/[^/].*"
    rf"|hf://{_REPOSITORY}(@[A-Za-z0-9._-]+)?(/[^/@].*)?|oci://[a-z0-9][A-Za-z0-9._:@/-]*(#[^/].*)?"
    r"|s3://[a-z0-9][a-z0-9.-]+/[^/].*|https://[^/?#@]+/[^?#]*[^?#/])"
)
SOURCE_MESSAGE = (
    "must be hf://ORG/NAME[@REVISION][/FILE], pvc://CLAIM/PATH, file:///PATH, package://DISTRIBUTION/FILE, oci://IMAGE[#PATH], "
    "s3://BUCKET/KEY or https://HOST/FILE"
)


def _source(text: str) -> None:
    if not re.fullmatch(SOURCE_PATTERN, text):
        raise ValueError(f"{text!r} {SOURCE_MESSAGE}")
    if ".." in re.split("[/#]", text):
        raise ValueError("must not contain '..'")


Source = Annotated[str, _checked(_source), WithJsonSchema({
    "type": "string",
    "maxLength": 1024,
    **rules(
        (f"self.matches('^{SOURCE_PATTERN}$')", SOURCE_MESSAGE),
        ("!self.replace('#', '/').split('/').exists(part, part == '..')", "must not contain '..'"),
    ),
})]

OWNED_FLAGS = (
    "host|port|control-host|control-port|control-token-file|boot-file|served-model-name|api-key|api-key-file|drain-timeout"
    "|leave-seconds|state-dir"
)
_EXTRA_MESSAGE = (
    "must be flags of weir-server as --flag=value, without those that the operator sets itself "
    "(host, ports, token, boot file, served name, API keys, drain)"
)


def _extra_args(args: list[str]) -> list[str]:
    if any(not arg.startswith("--") or re.match(f"--({OWNED_FLAGS})(=|$)", arg) for arg in args):
        raise ValueError(_EXTRA_MESSAGE)
    return args


ExtraArgs = Annotated[
    list[Annotated[str, Field(max_length=1024)]],
    Field(max_length=64, json_schema_extra=rules((
        f"self.all(arg, arg.startsWith('--') && !arg.matches('^--({OWNED_FLAGS})(=|$)'))", _EXTRA_MESSAGE,
    ))),
    AfterValidator(_extra_args),
]

_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _overlay(template: dict[str, Any]) -> dict[str, Any]:
    """The API server does not look into it, so this is said in the status."""
    spec = template.get("spec")
    for kind in ("containers", "initContainers"):
        containers = spec.get(kind) if isinstance(spec, dict) else None
        for container in containers if isinstance(containers, list) else ():
            if isinstance(container, dict) and container.get("name") == CONTAINER and container.get("args") is not None:
                raise ValueError(f"the args of container {CONTAINER} are Weir's: put yours in engine.extraArgs")
    return template


Overlay = Annotated[dict[str, Any], AfterValidator(_overlay), WithJsonSchema(_OPEN)]
Peers = Annotated[list[dict[str, Any]], Field(max_length=32), WithJsonSchema({
    "type": "array", "maxItems": 32, "items": {**_OPEN, "description": "A NetworkPolicyPeer."},
})]
Labels = Annotated[dict[str, str], WithJsonSchema({
    "type": "object", "additionalProperties": {"type": "string", "maxLength": 4096}, "maxProperties": 64,
})]
"""Labels or annotations; the API server checks them where they are used."""
NAME_PATTERN = "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
Name = Annotated[str, Field(max_length=253, pattern=NAME_PATTERN)]
"""The name of an object in the same namespace."""
