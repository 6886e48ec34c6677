# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import HealthCheck

DEFAULT = 800


def pytest_addoption(parser):
    parser.addoption("--examples", type=int, default=DEFAULT,
                     help="random problems for each property; any other number than the default "
                     "draws new ones each time (nightly: 20000)")


@pytest.fixture
def examples(request):
    return request.config.getoption("--examples")


@pytest.fixture
def relaxed(examples):
    """Settings of hypothesis: no deadline; the same problems each time unless asked for more."""
    return dict(deadline=None, derandomize=examples == DEFAULT, database=None,
                suppress_health_check=list(HealthCheck))
