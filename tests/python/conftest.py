# SPDX-License-Identifier: Apache-2.0
import os

import pytest
from hypothesis import HealthCheck

DEFAULT = 800


def pytest_addoption(parser):
    parser.addoption("--examples", type=int, default=DEFAULT,
                     help="random problems for each property; any other number than the default "
                     "draws new ones each time (nightly: 20000)")
    parser.addoption("--te-jax-all", action="store_true",
                     help="402 of TransformerEngine's calls for JAX, not 60 (nightly)")
    parser.addoption("--hf-all", action="store_true",
                     help="every architecture of transformers, not only some (nightly)")
    parser.addoption("--te-full", action="store_true",
                     help="TransformerEngine's Paddle cases at their full lengths (a GPU, or an hour)")


def pytest_configure(config):
    """TESSERA_TEST_DEVICE=cuda: the tests of Hugging Face's models and of examples/serve make their tensors there."""
    if "TESSERA_TEST_DEVICE" in os.environ:
        import torch
        torch.set_default_device(os.environ["TESSERA_TEST_DEVICE"])


@pytest.fixture
def examples(request):
    return request.config.getoption("--examples")


@pytest.fixture
def relaxed(examples):
    """Settings of hypothesis: no deadline; the same problems each time unless asked for more."""
    return dict(deadline=None, derandomize=examples == DEFAULT, database=None,
                suppress_health_check=list(HealthCheck))
