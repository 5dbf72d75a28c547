"""`python -m weightscope` is the command."""

from weightscope.cli import main

main()
