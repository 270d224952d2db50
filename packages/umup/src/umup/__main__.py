"""`umup` and `python -m umup`: the command, or one line that says what to install for it."""

import sys


def main() -> None:
    try:
        from umup.cli import main as run
    except ImportError as error:
        print(f"umup: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
