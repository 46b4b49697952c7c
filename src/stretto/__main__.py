"""`python -m stretto`."""

from __future__ import annotations

from stretto.cli import main

if __name__ == "__main__":  # spawned workers import this module again
    main()
