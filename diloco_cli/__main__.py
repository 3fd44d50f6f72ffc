"""Entry point of `diloco`: runs the commands and is the one place where errors become messages and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from diloco_cli.exit_codes import ExitCode, code_for


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        from diloco_cli.app import app

        app(args=[argument for argument in arguments if argument != "--debug"], prog_name="diloco")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        if debug:
            raise
        _explain(error)
        return code_for(error)
    return ExitCode.OK


def _explain(error: Exception) -> None:
    """Say in a line or a few what went wrong."""
    from diloco_runtime.errors import DilocoError

    if isinstance(error, DilocoError):
        print(f"error: {error}", file=sys.stderr)
    else:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        print(f"error: unexpected {what}; run it again with --debug for the traceback", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
