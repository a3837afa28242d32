"""See openrl_trainer beside it: both roles behave alike."""

from openrl_trainer.__main__ import command

if __name__ == "__main__":
    command()
