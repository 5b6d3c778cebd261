"""The file that says who may call what, and what its rules allow."""

from __future__ import annotations

import hashlib

import pytest

from weft_rl.contract.errors import InvalidRequestError, NotAllowedError, UnauthenticatedError
from weft_rl.rpc.security.access import ANYBODY, AccessRules, Role, check_call, parse_access

SECRET = "0123456789abcdef"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
_PUBLISH = "weft.v1.PublishService/AcquirePolicy"


def _one(line: str, roles: str = '"inspect"', more: str = "") -> AccessRules:
    return parse_access(f"[[identity]]\n{line}\nroles = [{roles}]\n{more}\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no toml [", "not TOML"),
        ("", "nobody could call"),
        ("identity = 3", "nobody could call"),
        ("identity = [3]", "is no table"),
        ("[other]\n", "'other'"),
        ('[[identity]]\nroles = ["inspect"]', "needs one of san and token_sha256"),
        (f'[[identity]]\nsan = "a"\ntoken_sha256 = "{DIGEST}"', "needs one of"),
        ('[[identity]]\nname = "a"\ntoken_sha256 = "secret"', "64 hexadecimal digits"),
        (f'[[identity]]\ntoken_sha256 = "{DIGEST}"', "needs a name"),
        ('[[identity]]\nsan = "a"\nroles = ["admin"]', "'admin' is no role"),
        ('[[identity]]\nsan = "a"\nroles = "inspect"', "must be a list"),
        ('[[identity]]\nsan = "a"\nroles = ["publish"]', "names no policies"),
        ('[[identity]]\nsan = "a"\npolicies = ["*"]', "has not the role publish"),
        ('[[identity]]\nsan = "a"\nrole = ["inspect"]', "has 'role'"),
        ("[[identity]]\nsan = 3", "san must be a string"),
        ('[[identity]]\nsan = "a"\n[limits]\nstreams = 0', "from 1 to"),
        ('[[identity]]\nsan = "a"\n[limits]\nstreams = true', "from 1 to"),
        ('[[identity]]\nsan = "a"\n[limits]\nbytes = 1', "may have requests and streams"),
        (
            f'[[identity]]\nsan = "a"\n[[identity]]\nname = "b"\ntoken_sha256 = "{DIGEST}"',
            "use one kind",
        ),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        parse_access(text)


@pytest.mark.parametrize("name", ["trainer-a.rl", "TRAINER-A.rl"])
def test_a_certificate_is_known_by_one_of_its_names(name: str) -> None:
    access = _one('san = "trainer-?.rl"')
    assert access.identify(["other", name], None).name == "trainer-a.rl"
    assert access.by_certificate


def test_a_token_is_known_by_its_digest_alone() -> None:
    access = _one(f'name = "a"\ntoken_sha256 = "{DIGEST}"')
    assert access.identify((), SECRET).name == "a"
    assert SECRET not in repr(access)
    for token in (None, "", "guess", DIGEST):
        with pytest.raises(UnauthenticatedError):
            access.identify(("a",), token)


def test_an_identity_has_the_roles_of_every_rule_that_it_matches() -> None:
    access = parse_access(
        '[[identity]]\nsan = "*.rl"\nroles = ["inspect"]\n'
        '[[identity]]\nsan = "a.rl"\nroles = ["publish"]\npolicies = ["code-*"]\n'
    )
    both = access.identify(["a.rl"], None)
    assert both.roles == {Role.INSPECT, Role.PUBLISH}
    assert both.policies == ("code-*",)
    assert access.identify(["b.rl"], None).roles == {Role.INSPECT}


def test_policies_are_patterns_of_whole_names() -> None:
    identity = _one('san = "a"', '"publish"', 'policies = ["math", "code-*"]').identify(["a"], None)
    for policy in ("math", "code-7", "code-"):
        check_call(identity, _PUBLISH, policy)
    for policy in ("math2", "acode-7", "MATH", "base"):
        with pytest.raises(NotAllowedError) as refused:
            check_call(identity, _PUBLISH, policy)
        assert refused.value.reason == "POLICY_NOT_ALLOWED"


def test_who_pushes_a_policy_may_forget_it_and_an_operator_any() -> None:
    forget = "weft.v1.AdminService/ForgetPolicy"
    trainer = _one('san = "a"', '"publish"', 'policies = ["code-*"]').identify(["a"], None)
    check_call(trainer, forget, "code-7")
    with pytest.raises(NotAllowedError) as refused:
        check_call(trainer, forget, "math")
    assert refused.value.reason == "POLICY_NOT_ALLOWED"
    operator = _one('san = "a"', '"operator"').identify(["a"], None)
    check_call(operator, forget, "math")
    both = _one('san = "a"', '"operator", "publish"', 'policies = ["code-*"]').identify(["a"], None)
    check_call(both, forget, "math")
    with pytest.raises(NotAllowedError):
        check_call(both, _PUBLISH, "math")


#: By role, a method of each service that it may call; each may call no other of these.
_MAY = {
    "inspect": {"InspectService/GetPool", "InspectService/WatchRoutes", "ReplicaService/GetStatus"},
    "generate": {
        "GenerateService/Generate",
        "InspectService/GetPool",
        "InspectService/WatchRoutes",
    },
    "publish": {
        "AdminService/ForgetPolicy",
        "PublishService/BeginTransfer",
        "RendezvousService/Attend",
    },
    "replica": {"RegistryService/Register", "RendezvousService/Attend"},
    "coordinator": {"ReplicaService/CommitTransfer", "ReplicaService/GetStatus"},
    "operator": {
        "AdminService/ForgetPolicy",
        "AdminService/Rollback",
        "InspectService/GetPool",
        "InspectService/WatchEvents",
        "InspectService/WatchRoutes",
        "ReplicaService/GetStatus",
    },
}
_METHODS = {method for methods in _MAY.values() for method in methods}


@pytest.mark.parametrize("role", list(Role))
def test_each_role_allows_its_calls_and_no_others(role: Role) -> None:
    more = 'policies = ["*"]' if role is Role.PUBLISH else ""
    identity = _one('san = "a"', f'"{role}"', more).identify(["a"], None)
    allowed = {method for method in _METHODS if identity.may_call(f"weft.v1.{method}")}
    expected = _MAY[role] | ({"InspectService/WatchEvents"} if role is Role.INSPECT else set())
    assert allowed == expected
    assert identity.may_call("grpc.health.v1.Health/Check")
    assert identity.may_call("grpc.channelz.v1.Channelz/GetServers") is (role is Role.OPERATOR)


def test_anybody_may_do_everything_where_nobody_is_asked() -> None:
    assert all(ANYBODY.may_call(f"weft.v1.{method}") for method in _METHODS)
    check_call(ANYBODY, _PUBLISH, "base")
