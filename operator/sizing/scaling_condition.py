"""The condition ScalingActive: whether the number of workers follows what the spec and its policy ask for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.operator.api.policy import Policy
from pdserve.operator.api.spec import ServiceSpec
from pdserve.operator.sizing.scaling import Decision
from pdserve.operator.status.conditions import Condition
from pdserve.operator.status.reasons import Reason

_TYPE = "ScalingActive"


def scaling_condition(
    spec: ServiceSpec, policy: Policy, policy_problem: str | None, decisions: Sequence[Decision]
) -> Condition:
    """The condition; `policy_problem`: why the policy is not the one that was asked for."""
    if policy_problem is not None:
        return Condition(_TYPE, spec.scaling == "Auto", Reason.POLICY_NOT_USABLE, policy_problem)
    usual = _by_mode(spec, decisions)
    not_supported = _not_supported(spec, policy)
    if not_supported:
        return Condition(_TYPE, False, Reason.NOT_SUPPORTED_YET, f"{not_supported} {usual.message}")
    return usual


def _by_mode(spec: ServiceSpec, decisions: Sequence[Decision]) -> Condition:
    if spec.scaling == "Auto":
        return Condition(_TYPE, True, Reason.AUTO, "The operator keeps each pool at its min.")
    if spec.scaling == "Off":
        return Condition(_TYPE, False, Reason.OFF, "The operator leaves the Deployments' replicas to others.")
    advice = ", ".join(f"{decision.pool} {decision.wanted}" for decision in decisions if decision.is_change)
    return Condition(_TYPE, False, Reason.ADVISE, f"Would set: {advice}." if advice else "Would change nothing.")


def _not_supported(spec: ServiceSpec, policy: Policy) -> str:
    of_policy = [f"{field} of ScalingPolicy {spec.policy}" for field in policy.not_supported]
    fields = [f"spec.{field}" for field in spec.not_supported] + of_policy
    if not fields:
        return ""
    verb = "is" if len(fields) == 1 else "are"
    return f"{', '.join(fields)} {verb} not supported by this version: load does not change the number of workers."
