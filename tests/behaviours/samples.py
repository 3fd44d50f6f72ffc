"""Small valid records."""

from __future__ import annotations

from diloco_runtime.records import CallRecord, CommitRecord, PayloadRef, RunRecord

RUN_ID = "0123456789abcdef"
OTHER_RUN_ID = "fedcba9876543210"


def run_record(run_id: str = RUN_ID, nonce: str = "first") -> RunRecord:
    return RunRecord(run_id=run_id, nonce=nonce, name="trial", code_version="0", config={}, created_wall=0.0)


def commit_record(seq: int, run_id: str = RUN_ID) -> CommitRecord:
    params = (PayloadRef(key=f"{run_id}/blobs/x", size=1, sha256="0"),)
    return CommitRecord(
        run_id=run_id,
        nonce=f"c{seq}",
        seq=seq,
        parent=f"c{seq - 1}" if seq else "",
        fragment=seq - 1,
        author="iowa",
        author_incarnation=1,
        successor="iowa",
        params=params,
    )


def call_record(seq: int, nonce: str, run_id: str = RUN_ID) -> CallRecord:
    return CallRecord(run_id=run_id, nonce=nonce, seq=seq, island="iowa", incarnation=1)
