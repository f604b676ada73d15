"""`python -m dflash`, also what torchrun starts."""

from dflash.cli import main

main()
