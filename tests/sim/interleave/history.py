"""What must hold of every write to a run's blackboard, judged from what lies there at that moment."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

import torch

from diloco_cli.simulation.storage import Bucket
from diloco_runtime.audit import Audit, read_audit
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import SystemClock, SystemNonces
from diloco_runtime.codec import decode_fragment
from diloco_runtime.config import RunConfig
from diloco_runtime.history import params_ref
from diloco_runtime.keys import Keys, fragment_of, version_before
from diloco_runtime.outer import merge, merge_weights, outer_step
from diloco_runtime.records import CallRecord, CommitRecord, Fragment, OfferRecord, PayloadRef, Position, Record, decode
from diloco_runtime.snapshot import load_state
from tests.sim.interleave.processes import Books, Holds, Request, Said, Told
from tests.sim.interleave.world import Contents

R = TypeVar("R", bound=Record)


class Looked:
    """Contents, and what a check has read of them."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.read: dict[str, bytes] = {}

    def at(self, key: str) -> bytes:
        assert key in self.contents.objects, f"{key} is not there"
        self.read[key] = self.contents.objects[key]
        return self.read[key]

    def record(self, kind: type[R], key: str) -> R:
        return decode(kind, self.at(key), key)

    def payload(self, ref: PayloadRef) -> bytes:
        data = self.at(ref.key)
        assert len(data) == ref.size and hashlib.sha256(data).hexdigest() == ref.sha256, f"{ref.key} is damaged"
        return data


class HistoryChecks:
    """Checks of one run whose every offer is good. Each raises `AssertionError`."""

    def __init__(self, config: RunConfig, keys: Keys, commits: int, read_once: bool) -> None:
        """`commits`: how many must have been made when everything has ended. `read_once`: see `Setting`."""
        self._config = config
        self._keys = keys
        self._commits = commits
        self._read_once = read_once
        self._passed: dict[tuple[str, bytes], dict[str, bytes]] = {}
        """Records that were found right, with everything that they rest on."""
        self._records: defaultdict[str, set[bytes]] = defaultdict(set)
        """Records by their nonce."""
        self._held_as: dict[int, tuple[Holds, bytes]] = {}
        """Copies that were found right, with the commit that they are of; by identity, which is quick."""
        self._balanced: set[tuple[Books, bytes]] = set()
        """Books that were found right, with the newest commit adopted."""
        self._ends: set[int] = set()

    def said(self, said: tuple[Said, ...], contents: Contents) -> None:
        for word in said:
            if isinstance(word, Told):
                self._outcome(word, contents)
            elif isinstance(word, Books):
                self._books(word, contents)
            else:
                self._held(word, contents)

    def _outcome(self, told: Told, contents: Contents) -> None:
        """Whoever is told what stands at a key is told what lies there; so a key has one winner at most."""
        key, nonce = told
        assert key in contents.objects, f"{nonce} is said to stand at {key}, but nothing is there"
        assert contents.objects[key] in self._records[nonce] or self._is_by(contents.objects[key], nonce), (
            f"{nonce} is said to stand at {key}, but another record is there"
        )

    def _books(self, books: Books, contents: Contents) -> None:
        """A learner's tokens add up, and it counts as merged what the log says was merged of it."""
        log = self._keys.log(books.adopted)
        assert log in contents.objects, f"a learner has adopted commit {books.adopted}, which was never made"
        # The newest commit names its parent, so the same one has the same history below it.
        if (books, contents.objects[log]) in self._balanced:
            return
        self._balanced.add((books, contents.objects[log]))
        looked, sums = Looked(contents), [0] * len(books.fates)
        for seq in range(1, books.adopted + 1):
            commit = looked.record(CommitRecord, self._keys.log(seq))
            mine = [e.tokens for e in commit.merged if (e.island, e.incarnation) == (books.island, books.incarnation)]
            sums[commit.fragment] += sum(mine)
        for fragment, f in enumerate(books.fates):
            assert f.processed == f.merged + f.refused + f.late + f.overwritten + f.offered + f.fresh, (
                f"the learner's tokens of fragment {fragment} do not add up: {f}"
            )
            assert f.merged == sums[fragment], (
                f"a learner counts {f.merged} tokens of fragment {fragment} as merged, the log {sums[fragment]}"
            )

    def _held(self, holds: Holds, contents: Contents) -> None:
        """A process's copy of a fragment equals the log's at the version that it says it holds."""
        log = self._keys.log(holds.version)
        assert log in contents.objects, f"version {holds.version} is held, which was never committed"
        if self._held_as.get(id(holds)) == (holds, contents.objects[log]):
            return
        looked = Looked(contents)
        commit = looked.record(CommitRecord, log)
        table = looked.record(CommitRecord, self._keys.log(0)).fragments
        committed = _tensors(looked, params_ref(commit, holds.fragment), table[holds.fragment])
        assert holds.values == plain(committed), f"other values of {holds.fragment} are held than {log} says"
        self._held_as[id(holds)] = (holds, contents.objects[log])

    def _is_by(self, data: bytes, nonce: str) -> bool:
        if json.loads(data)["nonce"] != nonce:
            return False
        self._records[nonce].add(data)
        return True

    def write(self, request: Request, contents: Contents) -> None:
        verb, key, data = request
        kind = key.split("/")[1] if "/" in key else key
        if verb == "create":
            assert kind in ("log", "calls", "offers", "data", "islands"), f"nobody should create {key} here"
            if key not in contents.objects and kind in ("log", "calls", "offers"):
                self._new_record(kind, key, data, contents)
        elif verb == "put":
            assert kind == "blobs", f"{key} is put, not created"
            assert contents.objects.get(key, data) == data, f"{key} is written again with other bytes"
        else:
            assert kind == "blobs", f"{key} is deleted"
            for record in self._needed(contents):
                assert key.encode() not in contents.objects[record], f"{key} is deleted, but {record} names it"

    def _needed(self, contents: Contents) -> list[str]:
        """Return the records whose payloads somebody still needs: commits, and offers to merges to come."""
        commits: list[str] = []
        while (key := self._keys.log(len(commits))) in contents.objects:
            commits.append(key)
        offers, open_ = f"{self._keys.root}/offers/", self._keys.offers(len(commits))
        return commits + [key for key in contents.objects if key.startswith(offers) and key >= open_]

    def _new_record(self, kind: str, key: str, data: bytes, contents: Contents) -> None:
        known = self._passed.get((key, data))
        if known is not None and known.items() <= contents.objects.items():
            return
        looked = Looked(contents)
        if kind == "log":
            self._commit(key, decode(CommitRecord, data, key), looked)
        elif kind == "offers":
            self._offer(key, decode(OfferRecord, data, key), looked)
        else:
            self._call(key, decode(CallRecord, data, key), looked)
        self._passed[key, data] = looked.read

    def _call(self, key: str, call: CallRecord, looked: Looked) -> None:
        assert key == self._keys.call(call.seq)
        if call.seq > 1 and self._keys.log(call.seq - 1) not in looked.contents.objects:
            looked.at(self._keys.call(call.seq - 1))
        first = looked.record(CommitRecord, self._keys.log(0))
        looked.at(self._keys.log(version_before(call.seq, len(first.fragments))))

    def _offer(self, key: str, offer: OfferRecord, looked: Looked) -> None:
        first = looked.record(CommitRecord, self._keys.log(0))
        count = len(first.fragments)
        assert key == self._keys.offer(offer.seq, offer.island, offer.incarnation)
        assert offer.fragment == fragment_of(offer.seq, count), f"{key} offers fragment {offer.fragment}"
        assert offer.anchor == version_before(offer.seq, count), f"{key} is anchored at {offer.anchor}"
        looked.at(self._keys.log(offer.anchor))
        decode_fragment(looked.payload(offer.payload), first.fragments[offer.fragment], offer.codec, key)

    def _commit(self, key: str, commit: CommitRecord, looked: Looked) -> None:
        seq, first = commit.seq, looked.record(CommitRecord, self._keys.log(0))
        assert key == self._keys.log(seq), f"{key} says it is commit {seq}"
        parent = looked.record(CommitRecord, self._keys.log(seq - 1))
        assert commit.parent == parent.nonce, f"{key} names {commit.parent} as its parent, which is {parent.nonce}"
        assert commit.fragment == fragment_of(seq, len(first.fragments)), f"{key} merges fragment {commit.fragment}"
        assert not commit.refused, f"{key} refuses {commit.refused[0].nonce}: {commit.refused[0].reason}"
        if parent.phase == "run":
            looked.at(self._keys.call(seq))
            assert commit.merged, f"{key} merges nothing"
        offers = [self._merged(key, commit, index, looked) for index in range(len(commit.merged))]
        earlier = [looked.record(CommitRecord, self._keys.log(number)) for number in range(seq)]
        before = {entry.nonce for past in earlier for entry in past.merged}
        assert not before & {offer.nonce for offer in offers}, f"{key} merges an offer again"
        credited = sum(entry.tokens for entry in commit.merged) * first.fragments[commit.fragment].numel
        assert commit.credited == credited, f"{key} credits {commit.credited} tokens x parameters, not {credited}"
        assert commit.credited_total == parent.credited_total + credited, f"{key} adds up its credited tokens wrongly"
        self._values(key, commit, offers, parent.phase == "drain", looked)

    def _merged(self, key: str, commit: CommitRecord, index: int, looked: Looked) -> OfferRecord:
        entry = commit.merged[index]
        offer = looked.record(OfferRecord, self._keys.offer(commit.seq, entry.island, entry.incarnation))
        said = (entry.nonce, entry.anchor, entry.inner_steps, entry.tokens, entry.data_to, entry.payload)
        assert said == (offer.nonce, offer.anchor, offer.inner_steps, offer.tokens, offer.data_to, offer.payload), (
            f"{key} says something else of {entry.nonce} than the offer"
        )
        count = len(looked.record(CommitRecord, self._keys.log(0)).fragments)
        assert entry.anchor == version_before(commit.seq, count), f"{key} merges an offer anchored at {entry.anchor}"
        return offer

    def _values(self, key: str, commit: CommitRecord, offers: list[OfferRecord], final: bool, looked: Looked) -> None:
        """The new parameters are what the standing history gives, bit for bit."""
        table, outer = looked.record(CommitRecord, self._keys.log(0)).fragments, self._config.outer
        fragment = table[commit.fragment]
        past = looked.record(CommitRecord, self._keys.log(version_before(commit.seq, len(table))))
        params = _tensors(looked, params_ref(past, commit.fragment), fragment)
        buffer = _tensors(looked, past.momentum, fragment) if past.momentum else None
        if offers:
            ordered = sorted(offers, key=lambda offer: (offer.payload.sha256, offer.nonce))
            weights = merge_weights([(o.tokens, o.inner_steps) for o in ordered], outer.weight)
            deltas = [_tensors(looked, o.payload, fragment, o.codec) for o in ordered]
            delta = merge(fragment, outer.merge, zip(deltas, weights, strict=True))
            params, buffer = outer_step(params, buffer, delta, outer.lr, 0.0 if final else outer.momentum)
        assert _equal(_tensors(looked, commit.params[0], fragment), params), f"{key} has other parameters"
        kept = _tensors(looked, commit.momentum, fragment) if commit.momentum else None
        assert _equal(kept or {}, buffer or {}), f"{key} has another momentum"

    def end(self, contents: Contents) -> None:
        """The run has its commits, its books balance, and its newest state can be loaded."""
        if contents.digest in self._ends:
            return
        self._ends.add(contents.digest)
        store = Bucket()
        for key, data in contents.objects.items():
            store.put(key, data)
        board = Blackboard(store, self._keys.root, SystemClock(), SystemNonces())
        audit = read_audit(board)
        assert len(audit.commits) > self._commits, f"the log ends with commit {len(audit.commits) - 1}"
        assert not audit.check(), f"the books do not balance: {audit.problems}"
        if self._read_once:
            _check_data(audit)
        load_state(board)


def _check_data(audit: Audit) -> None:
    """No data is in a fragment twice, whichever life of the island has read it."""
    offers, reached = {offer.nonce: offer for offer in audit.offers}, dict[tuple[str, int], Position]()
    for commit in audit.commits:
        # A commit may merge the last offer of one life and the first of the next.
        merged = sorted((offers[entry.nonce] for entry in commit.merged), key=lambda offer: offer.data_from.order())
        for offer in merged:
            where = (offer.island, commit.fragment)
            before = reached.get(where, Position())
            assert before.order() <= offer.data_from.order(), f"{where} trains on from {offer.data_from}, not {before}"
            reached[where] = offer.data_to


def plain(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Return tensors as values that can be compared."""
    return tuple(sorted((name, tuple(value.flatten().tolist())) for name, value in tensors.items()))


def _tensors(looked: Looked, ref: PayloadRef, fragment: Fragment, codec: str = "fp32") -> dict[str, torch.Tensor]:
    return decode_fragment(looked.payload(ref), fragment, codec, ref.key)


def _equal(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
