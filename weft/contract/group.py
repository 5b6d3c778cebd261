"""How large a side group may be."""

from __future__ import annotations

from typing import Final

#: Members that one replica may add to a side group.
MAX_RECEIVERS: Final = 1024
#: Ranks of one side group, the sender included. The coordinator plans no larger one,
#: and a replica joins none: what a rank keeps of each other one adds up.
MAX_GROUP_SIZE: Final = 16_384
