"""See openrl_trainer beside it."""
