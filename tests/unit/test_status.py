"""The status: what an onlooker can tell from records and processes on its own clock; fates, goodput, staleness."""

import json

import pytest

from diloco_cli.accounting import fates_of, goodput, merged_seen, tokens_credited, traffic
from diloco_cli.island_report import Scene, judge
from diloco_cli.looking import IslandLook
from diloco_cli.sights import Sight
from diloco_cli.status import StatusReport, build_report
from diloco_cli.views import PLAIN_EVERY, LiveView, fates_line, headline, print_status, summary_lines
from diloco_runtime.records import ControlRecord, Fates, HeartbeatRecord, LearnerStatus, SupervisorRecord, SyncerStatus
from tests.support.cli_records import CONFIG, RUN, TABLE, beat, commit, look, seen, supervisor

# ---- states ---------------------------------------------------------------------------------------------------------

GONE = Sight()


@pytest.mark.parametrize(
    ("island", "context", "state", "reason"),
    [
        (seen(sight=GONE), {}, "PENDING", "not started yet"),
        (seen(), {}, "STARTING", ""),
        (seen((beat(launch="l0"),)), {}, "STARTING", ""),
        (seen((beat(learner=LearnerStatus()),)), {}, "STARTING", ""),
        (seen((beat(),)), {}, "RUNNING", ""),
        (seen((beat(),), moved=89.0), {}, "STALE", "no progress for 11 s"),
        (seen((beat(),), moved=91.0), {}, "RUNNING", ""),
        (seen((beat(),), moved=None), {}, "STALE", "no progress for 100 s"),
        (seen((beat(),), moved=None), {"first_at": 97.0}, "RUNNING", "age unknown"),
        (seen((beat(),), learner_moved=80.0), {}, "STALE", "its learner made no progress for 20 s"),
        (seen((beat(),), learner_moved=88.0), {}, "RUNNING", ""),
        (
            seen((beat(learner=LearnerStatus(state="training", step_seconds=9.0)),), learner_moved=20.0),
            {},
            "RUNNING",
            "",
        ),
        (seen((beat(),), sight=Sight("l1", held=True)), {}, "STALE", "its process is held by SIGSTOP"),
        (seen((beat(),), sight=GONE), {}, "DOWN", "no process"),
        (
            seen((beat(),), sight=GONE),
            {"supervisor": supervisor()},
            "RESTARTING",
            "no process; its supervisor launches it again",
        ),
        (seen((beat(),), sight=GONE), {"supervisor": supervisor(ended=True)}, "DOWN", "no process"),
        (
            seen((beat(),), sight=GONE),
            {"supervisor": supervisor(given_up=("a",))},
            "FAILED",
            "given up; `diloco logs` says why",
        ),
        (seen((beat(state="failed", reason="no memory"),), sight=GONE), {}, "FAILED", "no memory"),
        (
            seen((beat(state="stopped", learner=LearnerStatus(state="finished")),), sight=GONE),
            {"head": commit(9, phase="final")},
            "DONE",
            "finished",
        ),
        (seen((beat(),), sight=GONE), {"head": commit(9, phase="final")}, "DONE", "was gone before the end"),
        (seen((beat(host="there"),), sight=GONE), {}, "RUNNING", ""),
        (seen((beat(host="there"),), sight=GONE, moved=50.0), {}, "STALE", "no progress for 50 s"),
        (seen((beat(host="there", state="stopped"),), sight=GONE), {}, "DOWN", "no process"),
    ],
)
def test_an_island_is_judged(island: IslandLook, context: dict[str, object], state: str, reason: str) -> None:
    assert judge(island, Scene(look(island, **context), CONFIG, "here")) == (state, reason)


@pytest.mark.parametrize(
    ("context", "alive", "state"),
    [
        ({}, False, "PENDING"),
        ({}, True, "RUNNING"),
        ({"head": commit(3)}, False, "DOWN"),
        ({"head": commit(3, phase="drain", drain_left=2)}, True, "DRAINING"),
        ({"head": commit(3), "control": ("stop", 1)}, True, "STOPPING"),
        ({"head": commit(3), "control": ("stop", 1)}, False, "STOPPED"),
        ({"head": commit(3, phase="final", reason="budget")}, False, "FINISHED"),
        ({"head": commit(3, phase="final", reason="diloco down", control=1), "control": ("stop", 1)}, False, "STOPPED"),
        ({"head": commit(3, phase="final", reason="budget", control=1), "control": ("run", 2)}, True, "RUNNING"),
    ],
)
def test_a_run_is_judged(context: dict[str, object], alive: bool, state: str) -> None:
    if isinstance(wish := context.get("control"), tuple):
        fields = {"run_id": RUN, "nonce": "k", "number": wish[1], "action": wish[0]}
        context = {**context, "control": ControlRecord.model_validate(fields)}
    island = seen((beat(),)) if alive else seen(sight=GONE)
    assert build_report(RUN, "file:///x", Scene(look(island, **context), CONFIG, "here")).state == state


def test_a_supervisors_own_verdicts_win() -> None:
    report = build_report(RUN, "s", Scene(look(seen((beat(),))), CONFIG, "here"), {"a": ("STALE", "because")})
    assert (report.islands[0].state, report.islands[0].reason) == ("STALE", "because")
    assert report.problems == ("a: STALE, because",)


def test_what_a_learner_complains_about_is_a_problem() -> None:
    island = seen((beat(learner=LearnerStatus(state="training", ticks=1, problem="the store is slow")),))
    assert build_report(RUN, "s", Scene(look(island), CONFIG, "here")).problems == ("a: the store is slow",)


def troubled(incarnation: int, skipped: int, reread: int, resets: int = 0) -> HeartbeatRecord:
    counts = {"skipped_steps": skipped, "reset_fragments": resets, "reread_samples": reread}
    learner = LearnerStatus.model_validate({"state": "training", "ticks": 1, **counts})
    return beat("b", incarnation, learner=learner)


def test_undone_steps_and_samples_read_again_stay_visible(capsys: pytest.CaptureFixture[str]) -> None:
    lives = (troubled(1, 2, 0, 1), troubled(2, 1, 32, 2))
    report = build_report(RUN, "s", Scene(look(seen((beat(),)), seen(lives)), CONFIG, "here"))
    said = (
        "b: 3 inner steps undone because loss or gradient was not finite",
        "b: a fragment that was not finite was set back 3 times instead of offered",
        "b: 32 samples read again because no further unit could be claimed",
    )
    assert report.problems == said, "of all lives, and nothing of the island that had none"
    a, b = json.loads(json.dumps(report.as_json()))["islands"]
    assert (a["skipped_steps"], a["reread_samples"]) == (0, 0)
    assert (b["skipped_steps"], b["reset_fragments"], b["reread_samples"]) == (3, 3, 32)
    assert summary_lines(report, 1.0, None)[-3:] == [f"! {problem}" for problem in said]
    print_status(report)
    shown = capsys.readouterr().out
    assert all(f"! {problem}" in shown for problem in said)
    one = build_report(RUN, "s", Scene(look(seen((troubled(1, 1, 1),))), CONFIG, "here"))
    assert one.problems[0].startswith("b: 1 inner step undone") and one.problems[1].startswith("b: 1 sample read")


def test_without_a_terminal_a_problem_is_told_when_it_is_new(clock, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    def picture(skipped: int) -> StatusReport:
        return build_report(RUN, "s", Scene(look(seen((troubled(1, skipped, 0),))), CONFIG, "here"))

    with LiveView(clock) as view:
        for skipped in (0, 1, 1, 2):
            view.show(picture(skipped))
            clock.now += PLAIN_EVERY
    told = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in told if line.startswith("!")] == [
        "! b: 1 inner step undone because loss or gradient was not finite",
        "! b: 2 inner steps undone because loss or gradient was not finite",
    ]
    assert len(told) == 4 + 2


@pytest.mark.parametrize(
    ("record", "moved", "first_at", "state"),
    [
        (None, None, 0.0, "NONE"),
        (supervisor(ended=True), 99.0, 0.0, "ENDED"),
        (supervisor(), 99.0, 0.0, "ACTIVE"),
        (supervisor(), 50.0, 0.0, "SILENT"),
        (supervisor(), None, 99.0, "UNKNOWN"),
        (supervisor(), None, 0.0, "SILENT"),
    ],
)
def test_the_supervisor_is_judged(
    record: SupervisorRecord | None, moved: float | None, first_at: float, state: str
) -> None:
    seen_now = look(supervisor=record, supervisor_moved=moved, first_at=first_at)
    assert build_report(RUN, "s", Scene(seen_now, CONFIG, "here")).supervisor == state


# ---- numbers --------------------------------------------------------------------------------------------------------


def life(
    name: str, incarnation: int, fates: tuple[Fates, ...], busy: float, agent: str, uptime: float, **more: object
) -> HeartbeatRecord:
    learner = LearnerStatus(state="training", ticks=1, fates=fates, busy_seconds=busy, bytes_up=5, requests=2)
    return beat(name, incarnation, agent=agent, uptime=uptime, learner=learner, **more)


FATES = (Fates(processed=100, merged=60, late=10, offered=20, fresh=10), Fates(processed=100, merged=100))


def test_fates_add_up_and_a_dead_life_loses_what_it_held() -> None:
    old, new = life("a", 1, FATES, 0.0, "x", 1.0), life("a", 2, FATES, 0.0, "x", 1.0)
    merged = merged_seen([old, new], TABLE)
    assert merged == 2 * (60 * 30 + 100 * 10)
    found = fates_of([(old, False), (new, True)], TABLE, merged)
    assert found.processed == 200.0
    assert found.merged == merged / 40 and found.late == 2 * 10 * 30 / 40
    assert found.pending == 30 * 30 / 40, "the living life's offered and fresh tokens"
    assert found.lost == 30 * 30 / 40, "the dead life's"
    total = found.merged + found.refused + found.late + found.overwritten + found.pending + found.lost
    assert total == found.processed


def test_what_the_log_credits_is_merged_even_if_its_author_died_before_saying_so() -> None:
    dead = life("a", 1, FATES, 0.0, "x", 1.0)
    found = fates_of([(dead, False)], TABLE, merged_seen([dead], TABLE) + 20 * 30)
    assert found.lost == 10 * 30 / 40


def test_goodput_is_useful_time_over_the_time_agents_lived() -> None:
    half = (Fates(processed=10, merged=5), Fates(processed=10, merged=5))
    a = [life("a", 1, half, 30.0, "x", 50.0), life("a", 2, half, 30.0, "x", 100.0), life("a", 3, half, 0.0, "y", 20.0)]
    b = [life("b", 1, half, 60.0, "z", 80.0)]
    assert goodput([a, b], TABLE) == (60 * 0.5 + 60 * 0.5) / (100 + 20 + 80)
    assert goodput([], TABLE) is None


def test_traffic_counts_every_learner_once_and_a_syncer_once_per_agent() -> None:
    syncer = SyncerStatus(bytes_up=100, bytes_down=10, requests=7)
    lives = [life("a", n, (), 0.0, "x", 1.0, syncer=syncer) for n in (1, 2)]
    sent = traffic(lives)
    assert (sent.bytes_up, sent.bytes_down, sent.requests) == (2 * 5 + 100, 10, 2 * 2 + 7)


def test_progress_budget_pace_and_offers() -> None:
    recent = tuple(commit(n, merged=n % 3 + 1) for n in range(1, 7)) + (commit(7, 20_000, merged=0, phase="drain"),)
    report = build_report(
        RUN, "s", Scene(look(seen((beat(),)), head=recent[-1], recent=recent, pace=5.0), CONFIG, "here")
    )
    assert tokens_credited(recent[-1], TABLE) == report.tokens == 500.0
    assert (report.budget, report.eta_seconds, report.parameters, report.commits) == (1000, 100.0, 40, 7)
    assert report.offers_per_commit == 2.0, "the final merges do not count"
    raised = ControlRecord(run_id=RUN, nonce="k", number=1, action="run", tokens=5000)
    assert build_report(RUN, "s", Scene(look(head=recent[-1], control=raised), CONFIG, "here")).budget == 5000


def test_json_and_words(capsys: pytest.CaptureFixture[str]) -> None:
    report = build_report(RUN, "s", Scene(look(seen((beat(),)), head=commit(4, 8000)), CONFIG, "here"))
    document = json.loads(json.dumps(report.as_json()))
    assert document["schema_version"] == 1 and document["islands"][0]["name"] == "a"
    assert "demo RUNNING, 200 of 1 k tokens (20 %), commit 4" in headline(report)
    assert fates_line(report).startswith("tokens processed 200: 200 merged")
    assert len(summary_lines(report, 61.0, 2.5)) == 3
    print_status(report)
    assert "ISLAND" in capsys.readouterr().out
