"""`python -m dflash`, also what torchrun starts."""

from dflash.cli import main

if __name__ == "__main__":  # processes that tokenise import this module again
    main()
