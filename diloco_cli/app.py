"""The commands of `diloco`: each reads its arguments, calls one module and reports.

Heavy imports happen inside the commands, so that `diloco --help` starts in a tenth of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco_cli.exit_codes import MEANINGS, ExitCode
from diloco_cli.help import PanelGroup
from diloco_cli.questions import ask, show_plan

DEFAULT_SPEC = "run.toml"
RUNNING, LOOKING, USING = "Run", "Look", "Use the model"

EPILOG = "\n".join(f"{int(code):>5}  {meaning}" for code, meaning in MEANINGS.items())

app = typer.Typer(
    cls=PanelGroup,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=EPILOG,
    help="Train one model on compute scattered over clouds, through one object-store folder.",
)

SpecPath = Annotated[str, typer.Argument(metavar="SPEC", help="Run spec (TOML).", show_default=True)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
At = Annotated[int | None, typer.Option("--at", min=0, help="Log position instead of the newest.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from diloco_runtime import __version__

        typer.echo(f"diloco {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; goes with every command.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Train one model on compute scattered over clouds, through one object-store folder."""


# ---- run ------------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=RUNNING)
def init(place: Annotated[str, typer.Argument(metavar="DIR|FILE", help="Where to write it.")] = ".") -> None:
    """Write a commented run spec and a small text to start from."""
    from diloco_cli.starter import write_starter

    for line in write_starter(place):
        typer.echo(line)


@app.command(rich_help_panel=RUNNING)
def plan(spec: SpecPath = DEFAULT_SPEC, json: Json = False) -> None:
    """Show what a run creates and sends, without doing anything."""
    from diloco_cli.looks import look_for_plan
    from diloco_cli.spec import load_spec

    found = look_for_plan(load_spec(spec))
    if json:
        _print_json(found.as_json())
    else:
        from diloco_cli.views import print_plan

        print_plan(found)


@app.command(rich_help_panel=RUNNING)
def check(spec: SpecPath = DEFAULT_SPEC, json: Json = False) -> None:
    """Try the store out: rights, conditions, speed, clock, what leaving it costs.

    Leaves nothing there. `up` and `train` prove rights and conditions by themselves.
    """
    from diloco_cli.spec import load_spec
    from diloco_cli.store_check import check as check_store

    found = check_store(load_spec(spec))
    if json:
        _print_json(found.as_json())
    else:
        from diloco_cli.views import print_check

        print_check(found)


@app.command(rich_help_panel=RUNNING)
def simulate(
    spec: SpecPath = DEFAULT_SPEC,
    commits: Annotated[int, typer.Option("--commits", min=1, help="Outer steps simulated one by one.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same losses.")] = 0,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Draw it as well.")] = None,
    json: Json = False,
) -> None:
    """Predict goodput, traffic, cost and time of a run, and compare settings; starts nothing."""
    from diloco_cli.simulate import show

    show(spec, seed, commits, plot, json)


@app.command(rich_help_panel=RUNNING)
def up(spec: SpecPath = DEFAULT_SPEC, yes: Yes = False) -> None:
    """Check the store and create the run, after showing the plan.

    Repeating it changes nothing.
    """
    from diloco_cli.looks import look_for_plan
    from diloco_cli.spec import load_spec
    from diloco_cli.training import bring_up

    loaded = load_spec(spec)
    show_plan(look_for_plan(loaded), yes)
    run, created = bring_up(loaded)
    typer.echo(f"run {run.name} is {'up' if created else 'already up'} (run id {run.id}); next: diloco train {spec}")


@app.command(rich_help_panel=RUNNING)
def train(
    spec: SpecPath = DEFAULT_SPEC,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Supervise in the background.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", hidden=True, help="For scripts: never ask.")] = False,
    after_control: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Launch a run's islands and keep them alive until it ends.

    Creates the run if need be, goes on where a stopped or killed run was. Ctrl-C leaves the islands running.
    """
    from diloco_cli import training
    from diloco_cli.spec import load_spec

    ready = training.make_ready(load_spec(spec), after_control, lambda plan: show_plan(plan, yes or not plan.rents))
    if _say_readiness(ready.readiness, ready.run.name, spec):
        if not detach:
            raise typer.Exit(training.supervise(ready.run))
        code, message = training.detach(ready)
        typer.echo(message, err=code != ExitCode.OK)
        if code == ExitCode.OK:
            typer.echo(f"look: diloco status {spec}   logs: diloco logs {spec} -f   stop: diloco down {spec}")
        raise typer.Exit(code)


@app.command(rich_help_panel=RUNNING)
def down(
    spec: SpecPath = DEFAULT_SPEC,
    purge: Annotated[bool, typer.Option("--purge", help="Also delete everything the run has on the store.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the last commits.")] = False,
    yes: Yes = False,
) -> None:
    """End a run: its last commits, then every process.

    Repeating it is fine; `diloco train` goes on later from the newest commit.
    """
    from diloco_cli.spec import load_spec
    from diloco_cli.teardown import take_down

    loaded = load_spec(spec)
    if purge and not yes:
        ask(f"Delete everything run {loaded.name} has in {loaded.place}, the model included?", default=False)
    take_down(loaded, now, purge, typer.echo)


# ---- look -----------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=LOOKING)
def status(
    spec: SpecPath = DEFAULT_SPEC,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking until Ctrl-C.")] = False,
    json: Json = False,
    quick: Annotated[bool, typer.Option("--quick", help="One look only: whether counters move stays unknown.")] = False,
) -> None:
    """Show a run: progress, tokens, islands, what is wrong.

    Takes up to two heartbeats, to see what moves.
    """
    from diloco_cli import looks
    from diloco_cli.runs import require_run
    from diloco_cli.spec import load_spec

    if watch and json:
        raise typer.BadParameter("--watch draws for people; take one of --watch and --json")
    run = require_run(load_spec(spec))
    if json:
        _print_json(looks.settled_report(run, not quick).as_json())
        return
    from diloco_cli import views

    if watch:
        views.watch_status(looks.pictures(run), run.clock)
    else:
        views.print_status(looks.settled_report(run, not quick))


@app.command(rich_help_panel=LOOKING)
def logs(
    spec: SpecPath = DEFAULT_SPEC,
    island: Annotated[str | None, typer.Argument(metavar="ISLAND", help="One island instead of all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Newest lines of each log.")] = 20,
    supervisor: Annotated[bool, typer.Option("--supervisor", help="The detached supervisor's log.")] = False,
) -> None:
    """Show what the islands log on this machine.

    A purge leaves the logs, so those of a purged run are shown too.
    """
    from diloco_cli.logs import find_logs, log_files, show
    from diloco_cli.spec import load_spec
    from diloco_runtime.clock import SystemClock

    loaded = load_spec(spec)
    here = find_logs(loaded, lambda line: typer.echo(line, err=True))
    show(log_files(loaded, here, island, supervisor), lines, follow, SystemClock(), typer.echo)


# ---- use the model --------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=USING)
def export(
    spec: SpecPath = DEFAULT_SPEC,
    at: At = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="File; default: RUN.safetensors.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write the global model to a safetensors file."""
    from diloco_cli.runs import require_position, require_run
    from diloco_cli.spec import load_spec
    from diloco_runtime.export import export_safetensors

    run = require_run(load_spec(spec))
    require_position(run, at)
    done = export_safetensors(run.board, output or f"{run.name}.safetensors", at, force)
    typer.echo(f"{done.path}: {done.parameters} parameters at log position {done.seq}, {done.tokens} tokens merged")


@app.command("eval", rich_help_panel=USING)
def evaluate(spec: SpecPath = DEFAULT_SPEC, at: At = None, json: Json = False) -> None:
    """Measure the global model on held-out data, on the CPU."""
    from diloco_cli.runs import require_position, require_run
    from diloco_cli.spec import load_spec
    from diloco_runtime.evaluate import load_model

    run = require_run(load_spec(spec))
    require_position(run, at)
    commit, task = load_model(run.board, run.config, str(run.spec.root), at)
    loss = task.held_out_loss()
    if json:
        _print_json({"schema_version": 1, "run": run.name, "log_position": commit.seq, "held_out_loss": loss})
    else:
        typer.echo(f"held-out loss {loss:.4f} at log position {commit.seq}")


@app.command(rich_help_panel=USING)
def sample(
    spec: Annotated[str, typer.Argument(metavar="SPEC|FILE", help="Spec or exported .safetensors.")] = DEFAULT_SPEC,
    prompt: Annotated[str, typer.Option("--prompt", "-p", show_default="a newline", help="Text to go on from.")] = "\n",
    length: Annotated[int, typer.Option("--length", "-l", min=0, help="Bytes to write.")] = 400,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0, help="0: always the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same text.")] = 0,
    at: At = None,
) -> None:
    """Let the global model write text (built-in gpt only)."""
    from diloco_runtime import sample as sampling

    if Path(spec).suffix == ".safetensors":
        if at is not None:
            raise typer.BadParameter("--at chooses a position in a run's log; an exported file holds just one")
        model = sampling.gpt_from_export(spec)
    else:
        from diloco_cli.runs import require_position, require_run
        from diloco_cli.spec import load_spec

        run = require_run(load_spec(spec))
        require_position(run, at)
        model = sampling.gpt_from_board(run.board, run.config, at)
    typer.echo(sampling.sample(model, prompt.encode(), length, temperature, seed))


# ---- shared ---------------------------------------------------------------------------------------------------------


def _print_json(value: object) -> None:
    from json import dumps

    typer.echo(dumps(value, indent=2))


def _say_readiness(readiness: str, name: str, spec: str) -> bool:
    """Say what `train` found; return whether there is anything to supervise."""
    if readiness == "finished":
        typer.echo(
            f"run {name} has reached its budget; raise run.tokens in {spec} and run this again to train on, or use the "
            f"model: diloco eval {spec}, diloco sample {spec}, diloco export {spec}"
        )
        return False
    if readiness == "stopped":
        typer.echo(f"run {name} was stopped while this command began; run it again to go on", err=True)
        raise typer.Exit(ExitCode.RUN_STOPPED)
    if readiness != "ready":
        typer.echo(f"run {name}: {'the budget was raised' if readiness == 'raised' else 'reopened after a stop'}")
    return True
