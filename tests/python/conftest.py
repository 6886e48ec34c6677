# SPDX-License-Identifier: Apache-2.0
"""Tests by front end. This folder and each test's own are on sys.path: a module that several folders import lies here,
names of modules are unique, and no folder has a package's name (`torch` would be found where PyTorch is not)."""

import collections
import os

import pytest
from hypothesis import HealthCheck

DEFAULT = 800


def pytest_addoption(parser):
    parser.addoption("--examples", type=int, default=DEFAULT,
                     help="random problems for each property; any other number than the default "
                     "draws new ones each time (nightly: 20000)")
    parser.addoption("--every-case", action="store_true",
                     help="each case of a test marked `every`, not each nth (nightly)")
    parser.addoption("--te-jax-all", action="store_true",
                     help="402 of TransformerEngine's calls for JAX, not 36 (nightly)")
    parser.addoption("--hf-all", action="store_true",
                     help="every architecture of transformers, not only some (nightly)")
    parser.addoption("--te-full", action="store_true",
                     help="TransformerEngine's Paddle cases at their full lengths (a GPU, or an hour)")


def pytest_collection_modifyitems(config, items):
    """@pytest.mark.every(n): each nth of a parametrised test's cases by day, all of them with --every-case or where
    cases are asked for by name. n and an axis's number of values have no common factor, or a value is never taken."""
    if config.getoption("--every-case") or any("[" in word for word in config.args):
        return
    seen, left_out = collections.Counter(), []
    for item in items:
        mark = item.get_closest_marker("every")
        if not mark:
            continue
        if seen[item.parent.nodeid, item.originalname] % mark.args[0]:
            left_out.append(item)
        seen[item.parent.nodeid, item.originalname] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        skipped = set(left_out)
        items[:] = [item for item in items if item not in skipped]


def pytest_configure(config):
    """TESSERA_TEST_DEVICE=cuda: the tests of Hugging Face's models and of examples/serve make their tensors there."""
    config.addinivalue_line("markers", "every(n): each nth case by day, all of them nightly (--every-case)")
    if "TESSERA_TEST_DEVICE" in os.environ:
        import torch
        torch.set_default_device(os.environ["TESSERA_TEST_DEVICE"])


@pytest.fixture
def one_device(monkeypatch):
    """Names of TE and xformers put caches, layers and lengths on a GPU wherever there is one. Tests that go on the CPU
    hide it, so that what they make lies beside these; with TESSERA_TEST_DEVICE=cuda all of it is on the GPU."""
    import torch
    if torch.get_default_device().type == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def examples(request):
    return request.config.getoption("--examples")


@pytest.fixture(scope="module")
def one_thread():
    """PyTorch on one thread: more cost small problems more than they give."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def relaxed(examples):
    """Settings of hypothesis: no deadline; the same problems each time unless asked for more."""
    return dict(deadline=None, derandomize=examples == DEFAULT, database=None,
                suppress_health_check=list(HealthCheck))
