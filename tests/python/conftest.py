# SPDX-License-Identifier: Apache-2.0
import pytest


def pytest_addoption(parser):
    parser.addoption("--examples", type=int, default=250,
                     help="random problems for each property (nightly: 10000)")


@pytest.fixture
def examples(request):
    return request.config.getoption("--examples")
