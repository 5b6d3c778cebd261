"""ms-swift's `swift rlhf`, which generates by a pool in the place of `swift rollout`.

from_swift_rollout.sh starts it; docs/integrations/ms-swift.md says what has changed.
"""

import os

from swift import rlhf_main
from swift.rewards import ORM, orms

from trainer_side.integrations.swift import install


class NumCharacters(ORM):
    def __call__(self, completions: list[str], **_: object) -> list[float]:
        return [float(len(set(text))) for text in completions]


orms["num_characters"] = NumCharacters  # yours go here, or into --external_plugins
install(os.environ.get("WEFT_COORDINATOR", "127.0.0.1:50051"), policy="math")  # on every rank
rlhf_main()
