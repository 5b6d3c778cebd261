"""Adapters that vLLM's OpenAI server knows: exact versions and aliases.

vLLM's own registry, ``OpenAIServingModels.lora_requests``, maps a requested name
to a ``LoRARequest``. An exact version maps to its own; an alias maps to that of the
version it stands for, so a response names the version that produced it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_side.engine import AliasRefusals
from rollout_side.vllm_engine.loading import lora_hook
from weft_rl.contract.errors import (
    DigestMismatchError,
    InvalidNameError,
    NotFoundError,
    NotReadyError,
    UnsupportedError,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.replica_report import AbsentPolicy

#: Range of our adapters' integer ids, far from those that vLLM counts up from 1.
FIRST_LORA_ID = 2**20
END_LORA_ID = 2**31
#: Versions, or names, that an answer lists at most, and characters of the one that was asked for.
_MAX_LISTED = 10
_MAX_NAME = 200


@dataclass(frozen=True)
class Refusal:
    """Answer to a request for a name that is not served, or not now."""

    status: int
    message: str
    reason: str

    @property
    def type(self) -> str:
        """Type of the error, as vLLM names it."""
        return "NotFoundError" if self.status == 404 else "ServiceUnavailable"


@dataclass
class ServedAdapter:
    """Adapter version that can be requested, or could until ``removed_at``."""

    request: Any
    content_digest: bytes
    removed_at: int | None = None
    """The tracker's mark when its name was removed."""
    unused_since: float | None = None
    """``time.monotonic()`` when it was first seen unused after that."""


def _own_names(serving_models: Any) -> tuple[str, ...]:
    bases = {model.name for model in serving_models.base_model_paths}
    files = {
        name
        for name, request in serving_models.lora_requests.items()
        if not request.lora_path.startswith(lora_hook.SCHEME)
    }
    return tuple(sorted(bases | files))


def _is_up_to(number: str, last: int) -> bool:
    return number.isascii() and number.isdigit() and len(number) < 20 and int(number) <= last


class ServedModels:
    """Names of adapters in vLLM's registry. Used from one event loop only."""

    def __init__(self, serving_models: Any) -> None:
        self._serving = serving_models
        self._ids = itertools.count(FIRST_LORA_ID)
        self._served: dict[PolicyVersion, ServedAdapter] = {}
        self._aliases: dict[str, PolicyVersion] = {}
        self._refused = AliasRefusals()
        #: Policies that the pool does not serve any more, by name.
        self.absent: Mapping[str, AbsentPolicy] = {}
        #: Version that ``base`` stands for; see ``set_base``.
        self.base = PolicyVersion(BASE_POLICY, 0)
        #: Names that vLLM's server has by its own arguments, sorted: of the base model, and
        #: of adapters that it loaded from files.
        self.own_names = _own_names(serving_models)
        self._name_base()
        serving_models.show_available_models = self._show_available_models

    @property
    def base_name(self) -> str:
        """First of the base model's own names."""
        return str(self._serving.base_model_paths[0].name)

    def set_base(self, version: PolicyVersion) -> None:
        """Let ``base``, and its exact version, name the base model beside its own names."""
        self.base = version
        self._name_base()

    def _name_base(self) -> None:
        paths = self._serving.base_model_paths
        paths[:] = [path for path in paths if path.name in self.own_names]
        for name in (BASE_POLICY, str(self.base)):
            if name not in self.own_names:
                path = copy.copy(paths[0])
                path.name = name
                if name == BASE_POLICY:  # as of an alias, its root is what it stands for
                    path.model_path = str(self.base)
                paths.append(path)

    def replace_lookup(
        self, make: Callable[[dict[str, Any]], dict[str, Any]], found: Callable[[str], bool]
    ) -> None:
        """Replace the mapping in which vLLM looks adapters up.

        Args:
            make: Makes the new mapping from the present one.
            found: Called with a name of the base model that vLLM looks up; returns whether it is
                to find it.
        """
        is_base = self._serving.is_base_model

        def is_base_model(name: str) -> bool:
            return is_base(name) and found(name)

        self._serving.lora_requests = make(self._serving.lora_requests)
        self._serving.is_base_model = is_base_model

    def request_of(self, version: PolicyVersion) -> Any:
        """Return vLLM's ``LoRARequest`` of a version."""
        if not self._can_be_requested(version):
            raise NotFoundError(f"{version} is not served here")
        return self._served[version].request

    def refusal(self, asked: str) -> Refusal | None:
        """Return why a request must not be admitted to the engine now; None if it may be.

        Args:
            asked: Model that the request asks for, which vLLM has found; empty for the base model.
        """
        policy, _, number = asked.rpartition("@")
        if asked in ("", BASE_POLICY) or self._is_own_base(asked):
            return self._refused_alias(asked or self.base_name, BASE_POLICY)
        if policy == BASE_POLICY:
            return None if number == str(self.base.version) else self.explain_unknown(asked)
        return self._refused_alias(asked, asked) if asked in self._aliases else None

    def explain_unknown(self, name: str) -> Refusal:
        """Return the answer to a name that vLLM does not know. It lists what can be requested
        instead: of an exact version, the versions of its policy."""
        policy, _, number = name.rpartition("@")
        if not policy:
            refused = self._refused_alias(name, name) or self._absent_policy(name, name)
            return refused or self._unknown(name)
        there = self._there(policy)
        if not there:
            gone = self.absent.get(policy)
            is_gone = gone is not None and _is_up_to(number, gone.last_version)
            return (self._absent_policy(name, policy) if is_gone else None) or self._unknown(name)
        why = f"it was retired, or is not here yet; of {policy} there are {there}"
        return Refusal(404, f"The model `{name}` does not exist: {why}", "VERSION_UNKNOWN")

    def _unknown(self, name: str) -> Refusal:
        """Return the answer to a name of nothing that was ever here."""
        adapters = sorted(alias for alias in self._aliases if not self._refused.why(alias))
        names = [*self.own_names, BASE_POLICY, *adapters]
        listed = ", ".join(names[:_MAX_LISTED])
        more = len(names) - _MAX_LISTED
        rest = f", and {more} more (GET /v1/models lists all)" if more > 0 else ""
        why = f"ask for {listed}{rest}; or push it first"
        asked = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
        return Refusal(404, f"The model `{asked}` does not exist: {why}", "POLICY_UNKNOWN")

    def _refused_alias(self, name: str, policy: str) -> Refusal | None:
        why = self._refused.why(policy)
        if not why:
            return None
        there = self._there(policy)
        others = f"; ask another replica, or for an exact version{f', {there}' * bool(there)}"
        return Refusal(503, f"The model `{name}` is refused: {why}{others}", self._refused.reason)

    def _absent_policy(self, name: str, policy: str) -> Refusal | None:
        gone = self.absent.get(policy)
        if gone is None:
            return None
        reason = "POLICY_UNKNOWN" if name == policy else "VERSION_UNKNOWN"
        return Refusal(404, f"The model `{name}` does not exist: {gone.reason}", reason)

    def _there(self, policy: str) -> str:
        """List the versions of a policy that can be requested, for messages; empty for none."""
        known = [self.base, *(v for v in self._served if self._can_be_requested(v))]
        numbers = sorted(v.version for v in known if v.policy == policy)
        names = ", ".join(f"{policy}@{number}" for number in numbers[-_MAX_LISTED:])
        if len(numbers) > _MAX_LISTED:
            return f"{len(numbers)} versions, the newest {names}"
        return names

    def _is_own_base(self, name: str) -> bool:
        return name in self.own_names and self._serving.lora_requests.get(name) is None

    def next_id(self) -> int:
        """Return an integer id that no adapter had."""
        number = next(self._ids)
        if number >= END_LORA_ID:
            raise UnsupportedError("all adapter ids of this process are used; restart the replica")
        return number

    def check_new(self, version: PolicyVersion) -> None:
        """Refuse a name that stands for something else here."""
        for name in (version.policy, str(version)):
            if self._serving.is_base_model(name):
                raise InvalidNameError(
                    f"{name!r} is the name of the base model here; give the adapter another, "
                    "or start the replica with another --served-model-name"
                )
            request = self._serving.lora_requests.get(name)
            if request is not None and not request.lora_path.startswith(lora_hook.SCHEME):
                raise InvalidNameError(
                    f"{name!r} is an adapter that was loaded from {request.lora_path}; "
                    "give yours another name"
                )

    def find(self, version: PolicyVersion) -> ServedAdapter | None:
        """Return the record of a version, removed or not; None if there is none."""
        return self._served.get(version)

    def is_served(self, version: PolicyVersion, content_digest: bytes) -> bool:
        """Return whether an adapter of this version and content can be requested already."""
        served = self._served.get(version)
        if served is None:
            return False
        if served.content_digest != content_digest:
            raise DigestMismatchError(
                f"{version} is served with digest {served.content_digest.hex()}, "
                f"not {content_digest.hex()}; versions are never changed"
            )
        if served.removed_at is not None:
            raise NotReadyError(f"{version} is being retired; wait until it is gone")
        return True

    def add(
        self, version: PolicyVersion, request: Any, content_digest: bytes, alias: int = 0
    ) -> None:
        """Make a version requestable, and set its alias. The alias stands for the version ``alias``
        if that can be requested, else for this one."""
        self._served[version] = ServedAdapter(request, content_digest)
        self._serving.lora_requests[str(version)] = request
        wanted = PolicyVersion(version.policy, alias)
        self.set_alias(wanted if self._can_be_requested(wanted) else version)

    def set_alias(self, version: PolicyVersion) -> None:
        """Let the bare name stand for a version; running requests keep theirs."""
        if not self._can_be_requested(version):
            raise NotFoundError(f"{version} is not served here")
        self._aliases[version.policy] = version
        self._serving.lora_requests[version.policy] = self._served[version].request

    def drop_alias(self, policy: str) -> None:
        """Let a bare name stand for nothing; running requests keep their version."""
        if self._aliases.pop(policy, None) is not None:
            self._serving.lora_requests.pop(policy, None)

    def refuse_aliases(self, refused: AliasRefusals) -> None:
        """Refuse these aliases, the base model's own name among them, and accept the others. Exact
        versions, and adapters from files, are answered throughout."""
        self._refused = refused

    def _can_be_requested(self, version: PolicyVersion) -> bool:
        served = self._served.get(version)
        return served is not None and served.removed_at is None

    def remove(self, version: PolicyVersion, mark: int) -> ServedAdapter | None:
        """Take a version's name away; requests that have it continue.

        Returns:
            Its record, with the mark of the first removal; None if unknown.
        """
        served = self._served.get(version)
        if served is None:
            return None
        if self._aliases.get(version.policy) == version:
            raise NotReadyError(
                f"{version} cannot be retired: the name {version.policy!r} stands for it"
            )
        self._serving.lora_requests.pop(str(version), None)
        if served.removed_at is None:
            served.removed_at = mark
        return served

    def forget(self, version: PolicyVersion) -> None:
        """Drop the record of a removed version."""
        self._served.pop(version, None)

    async def _show_available_models(self) -> Any:
        """Answer /v1/models: the base, each version once, each alias that is not refused.

        vLLM would list an alias under its target's name. An alias's ``root`` names
        what it stands for.
        """
        models = await self._serving.registry.show_available_models()
        base = models.data[0]
        if self._refused.why(BASE_POLICY):  # the server's own name stays: clients look for one
            models.data = [card for card in models.data if card.id != BASE_POLICY]
        card_type, permission_type = type(base), type(base.permission[0])
        for name, request in self._serving.lora_requests.items():
            alias = name != request.lora_name
            if alias and self._refused.why(name):
                continue
            models.data.append(
                card_type(
                    id=name,
                    root=request.lora_name if alias else request.lora_path,
                    parent=request.base_model_name or base.id,
                    permission=[permission_type()],
                )
            )
        return models
