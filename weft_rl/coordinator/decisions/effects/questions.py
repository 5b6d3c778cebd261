"""Questions to answer before more can be decided; the answers come back as events."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.pool import FitKey
from weft_rl.coordinator.decisions.state.values import AdapterSpec


@dataclass(frozen=True)
class CheckFit:
    """Preflight of a layout against one kind of replica; answered as FitChecked."""

    key: FitKey
    manifest: Manifest = field(repr=False, compare=False)
    adapter: AdapterSpec | None


@dataclass(frozen=True)
class LookUp:
    """Look-up of what is needed to bring a version to a replica; answered as LookedUp."""

    replica_id: str
    incarnation: str
    source_id: str
    source_address: str
    version: PolicyVersion


@dataclass(frozen=True)
class DescribeHeld:
    """Request for what the catalog is to record of a version; answered as HeldDescribed."""

    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion
    digest: bytes


Question = CheckFit | LookUp | DescribeHeld
