"""The choice between a delta and all elements: by what the pool takes, and what each costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_side.deltas.choice import (
    DeltaHistory,
    DeltaMode,
    PoolFacts,
    choose,
    why_too_large,
)
from weft_rl.containers import replace

GB = 10**9
FACTS = PoolFacts(served=b"v3", copied=b"v3", refusal="", on_device=False, num_bytes=GB)
#: All elements take ten seconds.
SLOW = 10**8


@pytest.mark.parametrize(
    ("changes", "how", "why"),
    [
        ({}, "delta", ""),
        ({"copied": b""}, "keep", "no copy yet"),
        ({"copied": b"v2"}, "keep", "another version than this trainer committed last"),
        ({"served": b""}, "keep", "another version"),
        ({"served": b"", "copied": b""}, "keep", "no copy yet"),
        ({"served": b"", "refusal": "base@0", "copied": b""}, "keep", "no copy yet"),
        ({"refusal": "replica-0 loads bases in place"}, "whole", "replica-0 loads bases in place"),
    ],
)
def test_a_delta_is_sent_where_the_pool_serves_what_was_copied(
    changes: dict[str, object], how: str, why: str
) -> None:
    facts = replace(FACTS, **changes)
    for mode in ("auto", "always"):
        choice = choose(mode, facts, DeltaHistory(send_rate=SLOW))  # type: ignore[arg-type]
        assert choice.how == how
        assert why in choice.why
        assert bool(choice.why) is (how != "delta")


REFUSAL = "replica-0 holds no copy"


@pytest.mark.parametrize(
    ("mode", "takers_share", "share", "how", "why"),
    [
        ("always", 0.0, 0.01, "whole", REFUSAL),
        ("always", 0.1, 0.4, "mixed", REFUSAL),
        ("auto", 0.0, 0.01, "whole", REFUSAL),
        # Comparing takes a tenth of the time of all elements, and the changes their share.
        ("auto", 0.5, 0.1, "mixed", REFUSAL),
        ("auto", 0.5, 0.2, "whole", "the push would take 30% longer, 25% are taken"),
        ("auto", 0.75, 0.2, "mixed", REFUSAL),
        ("auto", 0.1, 0.01, "whole", "the push would take 11% longer, 5% are taken"),
    ],
)
def test_a_delta_that_some_cannot_take_is_sent_to_the_others_where_that_is_worth_it(
    mode: DeltaMode, takers_share: float, share: float, how: str, why: str
) -> None:
    facts = replace(FACTS, refusal=REFUSAL, takers_share=takers_share)
    choice = choose(mode, facts, DeltaHistory(send_rate=SLOW, compare_rate=1e9, share=share))
    assert choice.how == how
    assert why in choice.why
    # Before it, there must be a copy of what the pool serves.
    copy = choose(
        mode,
        replace(facts, copied=b"v2"),
        DeltaHistory(send_rate=SLOW, compare_rate=1e9, share=share),
    )
    assert copy.how == ("keep" if how == "mixed" else "whole")


def test_a_mixed_push_is_not_thought_of_where_a_delta_would_not_be_sent() -> None:
    facts = replace(FACTS, refusal=REFUSAL, takers_share=0.9)
    assert choose("auto", facts, DeltaHistory()).how == "whole"
    assert choose("auto", facts, DeltaHistory(send_rate=2e9)).how == "whole"
    history = DeltaHistory(send_rate=SLOW)
    history.was_useless()
    assert choose("always", facts, history).how == "keep"


def test_auto_measures_first_and_leaves_fast_backends_alone() -> None:
    assert choose("auto", FACTS, DeltaHistory()).how == "whole"
    assert choose("always", FACTS, DeltaHistory()).how == "delta"
    within_host = DeltaHistory(send_rate=2e9)
    choice = choose("auto", FACTS, within_host)
    assert choice.how == "whole"
    assert "a delta would take as long" in choice.why
    assert choose("always", FACTS, within_host).how == "delta"
    small = replace(FACTS, num_bytes=SLOW // 25)
    assert choose("auto", small, DeltaHistory(send_rate=SLOW)).why == (
        "all elements are sent in 0.040 s"
    )
    # An accelerator compares faster, and what was measured counts more than what is thought.
    fast = DeltaHistory(send_rate=15e9)
    assert choose("auto", FACTS, fast).how == "whole"
    assert choose("auto", replace(FACTS, on_device=True), fast).how == "delta"
    assert choose("auto", FACTS, DeltaHistory(send_rate=SLOW, compare_rate=SLOW)).how == "whole"
    assert choose("auto", FACTS, DeltaHistory(send_rate=SLOW, share=0.9)).how == "whole"


def test_time_that_receivers_take_for_a_delta_counts() -> None:
    """Few bytes are of no use where each makes a copy of its model for them."""
    quick = DeltaHistory(send_rate=SLOW, compare_rate=1e10, stage_seconds=0.02)
    assert choose("auto", FACTS, quick).how == "delta"
    slow = replace(quick, stage_seconds=FACTS.num_bytes / SLOW)
    choice = choose("auto", FACTS, slow)
    assert choice.how == "whole"
    assert "a delta would take as long" in choice.why
    slow.was_useless()
    slow.num_paused = 0
    assert choose("auto", FACTS, slow).how == "delta"  # it may have been other work


def test_deltas_of_no_use_are_tried_ever_more_rarely_and_again_once_one_was() -> None:
    history, pauses = DeltaHistory(send_rate=SLOW), []
    for _ in range(6):
        history.was_useless()
        pauses.append(history.num_paused)
        while history.num_paused:
            choice = choose("always", FACTS, history)
            # The last before the next try leaves a copy for it.
            assert choice.how == ("whole" if history.num_paused > 1 else "keep")
            history.num_paused -= 1
        assert choose("always", FACTS, history).how == "delta"
    assert pauses == [1, 2, 4, 8, 16, 16]
    history.share = 0.02
    history.was_useful()
    assert (history.share, history.pause) == (0.02, 0)


def test_a_delta_that_was_slow_once_is_tried_again() -> None:
    """What was slow may have been a compiler, or a machine that had other work."""
    history = DeltaHistory(send_rate=SLOW, compare_rate=SLOW / 2, share=0.4)
    assert not history.pays(GB, on_device=False)
    history.was_useless()
    assert choose("auto", FACTS, history).how == "keep"
    history.num_paused -= 1
    assert choose("auto", FACTS, history).how == "delta"


@given(st.sampled_from(["auto", "always"]), st.floats(1e6, 1e13), st.booleans())
def test_the_larger_the_gain_the_less_a_delta_costs(
    mode: DeltaMode, rate: float, on_device: bool
) -> None:
    slower, faster = DeltaHistory(send_rate=rate), DeltaHistory(send_rate=2 * rate)
    gain = slower.gain(GB, on_device=on_device)
    assert gain >= faster.gain(GB, on_device=on_device) > 0
    facts = replace(FACTS, on_device=on_device)
    if choose(mode, facts, faster).how == "delta":
        assert choose(mode, facts, slower).how == "delta"


def test_a_delta_of_most_bytes_is_not_sent_and_says_how_many() -> None:
    assert why_too_large(500, 1000) == ""
    assert why_too_large(501, 1000) == "the delta has 50% of all bytes; up to 50% are sent"
    assert "120%" in why_too_large(1200, 1000)
