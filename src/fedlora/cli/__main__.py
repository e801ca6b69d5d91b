"""`python -m fedlora.cli`."""

from fedlora.cli import main

main()
