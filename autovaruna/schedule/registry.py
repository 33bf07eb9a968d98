"""Lists the policies by name; a new schedule is one file in `policies` and one line here."""

from __future__ import annotations

from autovaruna.schedule.policies.deepest_first import DeepestFirst
from autovaruna.schedule.policies.gpipe import GPipe
from autovaruna.schedule.policies.interleaved import Interleaved
from autovaruna.schedule.policies.one_f_one_b import OneFOneB
from autovaruna.schedule.policies.varuna import Varuna
from autovaruna.schedule.policies.zero_bubble import ZeroBubble
from autovaruna.schedule.policy import Policy

POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (GPipe(), OneFOneB(), Varuna(), Interleaved(), DeepestFirst(), ZeroBubble())
}
