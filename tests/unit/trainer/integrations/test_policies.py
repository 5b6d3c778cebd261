"""Publishers as frameworks' configurations describe them; nothing of this connects."""

import pytest

from trainer_side.integrations.policies import open_publisher
from trainer_side.push_request import PushOptions
from weft_rl.contract.errors import InvalidRequestError


@pytest.mark.parametrize("options", [{"check_finite": True}, PushOptions(check_finite=True)])
def test_options_may_be_a_mapping_as_yaml_has_them(options):
    settings = {"timeout_seconds": 7, "options": options}
    with open_publisher("127.0.0.1:1", "verl", settings) as publisher:
        assert publisher._settings.timeout_seconds == 7
        assert publisher._settings.options == PushOptions(check_finite=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"speed": 3}, "speed"), ({"options": {"finite": True}}, "finite"), ({"options": 3}, "3")],
)
def test_unknown_settings_are_refused_by_name(settings, named):
    with pytest.raises(InvalidRequestError, match=named):
        open_publisher("127.0.0.1:1", "verl", settings)
