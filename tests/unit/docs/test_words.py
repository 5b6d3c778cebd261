"""Class names end in a word of docs/concepts.md, or in a noun that every programmer knows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("weft_rl", "trainer_side", "rollout_side")
_CONCEPTS = _ROOT / "docs" / "concepts.md"


def _listed(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Words that one must know; another one replaces one of these.
MAX_WORDS = 40

#: Nouns that need no page.
GENERAL = _listed(
    """
    activity answer attempt backend backoff bound cache call caller capabilities catalog certificate
    change channel check checker client codec collector config connection content copy counter
    credentials declaration decoder device digest document drain driver encoder engine entry error
    event exporter facts failure feed file flag folder formatter gate generation guard handle
    handler heartbeat history id interceptor key kind layout level limit link list listing loader
    lock log loop mark member memory message meta metadata method metrics name note number object
    operation option order page pair part phase pipeline plan process progress proof purpose queue
    range rank reader receiver record rectangle refusal request response result role row rule sample
    sampling security sender server service servicer session settings signal size slot snapshot
    source span spec state step store stream summary table tensor thread ticket time token trace
    tracer trainer transaction type value vector view wait watcher watermark work worker writer
    """
)
#: Verbs that begin the names of events and effects, which are orders and reports of one thing.
VERBS = _listed(
    """
    abort acquire announce await begin call check close commit describe discard drain drop fit
    forget join leave load look open rebind refuse register release renew reply report restore
    retire save send set sleep take tick uncordon wake
    """
)
_VERB_PHRASES = ("state/events.py", "state/effects.py")
#: Classes of today whose names are not plain; this list only shrinks.
KNOWN = _listed(
    """
    Access Admitted Agent Agreement Announced Arrivals Arrived Ask Assembly Attendance
    BackendSelection Background BaseOf BaseSwitch Block Buffers Cell Cloner Compared Complete
    Contact Conversion DTensorPlaces Deadlines Deferred Delta DequantisedParams DeviceBlock
    DeviceMapping DeviceRef DeviceSegment DigestReading Dispatch Doorbell Draft Drainer Elements
    Export Factors Failed Fetched Filling Finding FinishReason Gathered GatheredWhole Givers
    Handed Handoff Handshake HeldElements Hello Holdings HostRef HostSegment Identity InPlaceLoad
    Incoming Kept KnownSum Left Listener LoadEnd Loaded LoadingSink LocalModel Lru MappedExchange
    Mapping Membership MemoryUse MergedElements MergedParams MetricsText Next Notices Opened
    Origin Origins Outcome Outgoing Packed Packer Packing Packings Padded Params Parity Peer Place
    Ports Prepared Probe ProgressReporter Publisher PushCallback PushSending Pushing RankHandoff
    Rate Ready ReceiverLike Receiving Reformed Registration RequestTracker RequestsAtSwitch
    Reservations Ring Rival RolloutsAsleep SampleChunk Sampled Sampler Sealed Segment SegmentRef
    Sendable Sending ServedModels Serving ShardedParams Shared Shown Sink Sleeper Slice Spiller
    Split StagingSink Stopped Sum Taken Target TiedDuplicates Tls Traffic TrialAnswerer Trials
    Tried Try Turn Usage Verdict Verified Wakeup Walk Wanted WeftCheckpointManager WeftRollout
    Weights Welcome WholeParams Window Withdraw Withdrawn Words Working WriteBlocker _Bar
    _CloseAtEnd _Course _Cuts _Demo _Direction _Fingerprint _Gloo _Held _Hello _InForce _Kept
    _Lent _LinkSum _Merge _Nccl _OutgoingIfThere _Overlaid _OwnSum _Parked _Pem _Pending _Piece
    _Places _Printed _Running _Slice _SpillRead _Stop _Tell _Waiting _Whole
    """
)
#: Public names of today that two classes or more have; this list only shrinks.
KNOWN_TWICE = _listed(
    """
    AbsentPolicy Arrived HeartbeatAnswer Identity Part Place Sender Sending Sum Traffic Wanted
    WeftServer
    """
)


def _words() -> set[str]:
    """Read the words of the table in concepts.md, without what stands before their heads."""
    rows = re.findall(r"^\| ([^|]+) \| ", _CONCEPTS.read_text(), re.MULTILINE)
    cells = [word.strip() for row in rows for word in row.split(",")]
    return {cell.split()[-1] for cell in cells if cell not in ("word", "---")}


def _parts(name: str) -> list[str]:
    found = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z][a-z0-9]*|[A-Z]+", name)
    return [part.lower() for part in found]


def _is_known(word: str, known: set[str] | frozenset[str]) -> bool:
    singular = {word, word.removesuffix("s"), re.sub("ies$", "y", word), word.removesuffix("ed")}
    return not singular.isdisjoint(known)


def _classes(root: Path) -> Iterator[tuple[Path, str]]:
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.parent.name != "v1":
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.ClassDef):
                        yield path.relative_to(root), node.name


def _is_plain(path: Path, name: str, known: set[str]) -> bool:
    parts = _parts(name)
    if str(path).endswith(_VERB_PHRASES) and any(_is_known(p, known | VERBS) for p in parts):
        return True
    return bool(parts) and _is_known(parts[-1], known)


def test_class_names_end_in_known_words() -> None:
    known = _words() | GENERAL
    found = {name for path, name in _classes(_ROOT) if not _is_plain(path, name, known)}
    assert sorted(found - KNOWN) == [], "name these by words of docs/concepts.md"
    assert sorted(KNOWN - found) == [], "these are mended: take them out of KNOWN"


def test_there_are_few_words() -> None:
    assert len(_words()) <= MAX_WORDS


def test_no_two_classes_have_one_name() -> None:
    counts = Counter(name for _, name in _classes(_ROOT) if not name.startswith("_"))
    twice = {name for name, count in counts.items() if count > 1}
    assert sorted(twice - KNOWN_TWICE) == [], "one word, one thing: give one of them another name"
    assert sorted(KNOWN_TWICE - twice) == [], "these are mended: take them out of KNOWN_TWICE"
