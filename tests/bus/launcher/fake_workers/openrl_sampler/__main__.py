"""See openrl_trainer beside it: both roles behave alike."""

import sys

from openrl_trainer.__main__ import main

sys.exit(main())
