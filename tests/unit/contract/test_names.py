"""Names that people choose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_rl.contract.errors import REASONS, InvalidNameError, error_from_reason
from weft_rl.contract.names import PolicyVersion, check_adapter_name, check_name


@pytest.mark.parametrize("name", ["math", "a", "A-b_c.9", "x" * 63, "0"])
def test_good_names(name):
    assert check_name(name, "policy") == name


@pytest.mark.parametrize(
    "name",
    ["", "a@b", "a/b", "..", "a..b", "a b", "x" * 64, "x" * 300, "-a", ".a", "é", "a\n", "a\0"],
)
def test_bad_names_are_refused_in_one_line(name):
    with pytest.raises(InvalidNameError, match="cannot name a policy") as caught:
        check_name(name, "policy")
    assert len(caught.value.message) < 300
    assert caught.value.status == "INVALID_ARGUMENT"


def test_base_is_no_adapter():
    with pytest.raises(InvalidNameError, match="base model"):
        check_adapter_name("base")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True), st.integers(0, 10**12))
def test_policy_version_round_trip(policy, version):
    value = PolicyVersion(policy, version)
    assert PolicyVersion.parse(str(value)) == value


@pytest.mark.parametrize("text", ["math", "math@", "@3", "math@x", "math@-1", "ma th@3", "math@٣"])
def test_texts_that_are_no_policy_version(text):
    with pytest.raises(InvalidNameError):
        PolicyVersion.parse(text)


def test_every_reason_rebuilds_its_type():
    for reason, kind in REASONS.items():
        error = error_from_reason(reason, "text", {"k": "v"})
        assert type(error) is kind
        assert (error.reason, error.metadata) == (reason, {"k": "v"})
    assert error_from_reason("SOMETHING_NEW", "text").reason == "SOMETHING_NEW"
