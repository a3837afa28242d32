"""The rest of the torch engine's service tests on vLLM, whose processes take a quarter of a minute each to start.

make test-vllm ARGS='-m long'
"""

from __future__ import annotations

import pytest

from bus.sampler.test_sampler_service import (  # noqa: F401
    test_v10_a_cancelled_request_leaves_the_line_or_the_engine_and_harms_nobody,
    test_v10_every_bad_request_gets_its_own_code_and_harms_nobody,
)
from bus.sampler.test_sampler_under_load import (  # noqa: F401
    test_v8_a_sampler_killed_in_the_middle_of_a_write_is_followed_by_one_that_serves_the_whole_version,
    test_v10_a_storm_of_requests_cancellations_and_updates_ends_with_every_request_settled_once,
)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]
