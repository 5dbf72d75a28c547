"""The command, as `weightscope` and as `python -m weightscope`."""

import sys


def main() -> None:
    """Run the command; Ctrl-C while it is being loaded ends it as quietly as later."""
    try:
        from weightscope.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
