"""Find the files that ship with the command line: `templates/` and `runtime/pyproject.toml`.

A built wheel carries them below `diloco_cli/_bundled/`; an editable install or a checkout has them at its root.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def find(name: str) -> Path:
    """Return the path of the shipped file or folder `name`, as it is called in the checkout.

    Raises `FileNotFoundError` when neither place has it: the installation is incomplete.
    """
    for root in (_PACKAGE / "_bundled", _PACKAGE.parent):
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(f"{name} is missing from this installation of diloco; install it again")
