"""The adapters that vLLM's OpenAI server knows: exact versions and aliases.

vLLM's own registry, ``OpenAIServingModels.lora_requests``, maps a requested name
to a ``LoRARequest``. An exact version maps to its own; an alias maps to that of the
version it stands for, so a response names the version that produced it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout_side.vllm_engine.loading import lora_hook
from weft.contract.errors import (
    DigestMismatchError,
    InvalidNameError,
    NotFoundError,
    NotReadyError,
    UnsupportedError,
)
from weft.contract.names import BASE_POLICY, PolicyVersion

#: Range of our adapters' integer ids, far from those that vLLM counts up from 1.
FIRST_LORA_ID = 2**20
END_LORA_ID = 2**31
#: Versions that an answer lists at most.
_MAX_LISTED = 10


@dataclass
class ServedAdapter:
    """An adapter version that can be requested, or could until ``removed_at``."""

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


class ServedModels:
    """Names of adapters in vLLM's registry. Used from one event loop only.

    Args:
        serving_models: vLLM's ``OpenAIServingModels``; its listing is replaced.
    """

    def __init__(self, serving_models: Any) -> None:
        self._serving = serving_models
        self._ids = itertools.count(FIRST_LORA_ID)
        self._served: dict[PolicyVersion, ServedAdapter] = {}
        self._aliases: dict[str, PolicyVersion] = {}
        self._hidden = False
        #: What ``base`` stands for, which is no adapter; see ``set_base``.
        self.base = PolicyVersion(BASE_POLICY, 0)
        #: Names that vLLM's server has by its own arguments, sorted: of the base model, and
        #: of adapters that it loaded from files.
        self.own_names = _own_names(serving_models)
        self._name_base()
        serving_models.show_available_models = self._show_available_models

    @property
    def base_name(self) -> str:
        """The base model's own name; the first of them."""
        return str(self._serving.base_model_paths[0].name)

    def set_base(self, version: PolicyVersion) -> None:
        """Let ``base``, and its exact version, name the base model beside its own names."""
        self.base = version
        self._name_base()

    def _name_base(self) -> None:
        paths = self._serving.base_model_paths
        paths[:] = [path for path in paths if path.name in self.own_names]
        for name in (BASE_POLICY, str(self.base))[self._hidden :]:
            if name not in self.own_names:
                path = copy.copy(paths[0])
                path.name = name
                if name == BASE_POLICY:  # as of an alias, its root is what it stands for
                    path.model_path = str(self.base)
                paths.append(path)

    def replace_lookup(self, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Have vLLM look adapters up in another mapping of what is there."""
        self._serving.lora_requests = make(self._serving.lora_requests)

    def request_of(self, version: PolicyVersion) -> Any:
        """vLLM's ``LoRARequest`` of a version.

        Raises:
            NotFoundError: It cannot be requested.
        """
        if not self._can_be_requested(version):
            raise NotFoundError(f"{version} is not served here")
        return self._served[version].request

    def explain_unknown(self, name: str) -> str:
        """What can be asked for in place of a name that vLLM does not know: the versions of
        its policy, if some can be requested; else empty."""
        policy = name.rpartition("@")[0] or name
        known = [self.base, *(v for v in self._served if self._can_be_requested(v))]
        numbers = sorted(v.version for v in known if v.policy == policy)
        if not numbers:
            return ""
        newest = [f"{policy}@{number}" for number in numbers[-_MAX_LISTED:]]
        names = ", ".join(newest)
        if len(numbers) > len(newest):
            names = f"{len(numbers)} versions, the newest {names}"
        if name == policy:  # an alias is unknown only while it is hidden
            return f"bare names are refused out of contact with the coordinator; there are {names}"
        return f"it was retired, or is not here yet; of {policy} there are {names}"

    def next_id(self) -> int:
        """An integer id that no adapter had.

        Raises:
            UnsupportedError: All 2**31 - 2**20 are used; restart the replica.
        """
        number = next(self._ids)
        if number >= END_LORA_ID:
            raise UnsupportedError("all adapter ids are used; restart the replica")
        return number

    def check_new(self, version: PolicyVersion) -> None:
        """Refuse a name that stands for something else here.

        Raises:
            InvalidNameError: The base model, or an adapter from a file, has it.
        """
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
        """What is known of a version, removed or not."""
        return self._served.get(version)

    def is_served(self, version: PolicyVersion, content_digest: bytes) -> bool:
        """Whether this very adapter can be requested already.

        Raises:
            DigestMismatchError: The version is served with other content.
            NotReadyError: It is being retired.
        """
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
        """Make a version requestable, and let the alias stand for it, or for the
        version ``alias`` if that can be requested."""
        self._served[version] = ServedAdapter(request, content_digest)
        self._serving.lora_requests[str(version)] = request
        wanted = PolicyVersion(version.policy, alias)
        self.set_alias(wanted if self._can_be_requested(wanted) else version)

    def set_alias(self, version: PolicyVersion) -> None:
        """Let the bare name stand for a version; running requests keep theirs.

        Raises:
            NotFoundError: It cannot be requested.
        """
        if not self._can_be_requested(version):
            raise NotFoundError(f"{version} is not served here")
        self._aliases[version.policy] = version
        if not self._hidden:
            self._serving.lora_requests[version.policy] = self._served[version].request

    def drop_alias(self, policy: str) -> None:
        """Let a bare name stand for nothing; running requests keep their version."""
        if self._aliases.pop(policy, None) is not None:
            self._serving.lora_requests.pop(policy, None)

    def hide_aliases(self, hidden: bool) -> None:
        """Refuse bare names, or serve them again; exact versions answer throughout, and the
        base model by its own names."""
        self._hidden = hidden
        self._name_base()
        for policy, version in self._aliases.items():
            if hidden:
                self._serving.lora_requests.pop(policy, None)
            else:
                self._serving.lora_requests[policy] = self._served[version].request

    def _can_be_requested(self, version: PolicyVersion) -> bool:
        served = self._served.get(version)
        return served is not None and served.removed_at is None

    def remove(self, version: PolicyVersion, mark: int) -> ServedAdapter | None:
        """Take a version's name away; requests that have it continue.

        Returns:
            Its record, with the mark of the first removal; None if unknown.

        Raises:
            NotReadyError: An alias stands for it.
        """
        served = self._served.get(version)
        if served is None:
            return None
        if self._aliases.get(version.policy) == version:
            raise NotReadyError(f"{version} is what {version.policy!r} stands for; never retired")
        self._serving.lora_requests.pop(str(version), None)
        if served.removed_at is None:
            served.removed_at = mark
        return served

    def forget(self, version: PolicyVersion) -> None:
        """Drop the record of a removed version."""
        self._served.pop(version, None)

    async def _show_available_models(self) -> Any:
        """vLLM's /v1/models: the base, each version once, each alias.

        vLLM would list an alias under its target's name. An alias's ``root`` says
        what it stands for.
        """
        models = await self._serving.registry.show_available_models()
        base = models.data[0]
        card_type, permission_type = type(base), type(base.permission[0])
        for name, request in self._serving.lora_requests.items():
            alias = name != request.lora_name
            models.data.append(
                card_type(
                    id=name,
                    root=request.lora_name if alias else request.lora_path,
                    parent=request.base_model_name or base.id,
                    permission=[permission_type()],
                )
            )
        return models
