"""What the warm parent imports: all that these workers need, so that a new one costs a fork."""

import openrl_common.worker  # noqa: F401
