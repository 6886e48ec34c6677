# SPDX-License-Identifier: Apache-2.0
"""What goes around the package: the build backend, the state of bindings, the list for a release."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from tessera import _bindings  # noqa: E402


@pytest.fixture
def clean_states(monkeypatch):
    monkeypatch.setattr(_bindings, "_why_not", {})


def test_a_missing_binding_warns_and_shows(clean_states, monkeypatch, tmp_path):
    monkeypatch.setattr(_bindings, "_PACKAGE", tmp_path / "python" / "tessera")
    with pytest.warns(RuntimeWarning, match="tessera.torch: libtessera_torch.so was not built; install the wheel"):
        assert not _bindings.load("torch", pytest.fail)
    assert "was not built" in _bindings._why_not["torch"]


def test_a_binding_that_does_not_load_warns_and_says_why(clean_states, monkeypatch, tmp_path):
    monkeypatch.setattr(_bindings, "_PACKAGE", tmp_path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "libtessera_torch.so").write_bytes(b"")

    def fail(path):
        raise OSError(f"{path}: file too short")

    with pytest.warns(RuntimeWarning, match="does not load: .*file too short"):
        assert not _bindings.load("torch", fail)
    assert "file too short" in _bindings._why_not["torch"]


def test_a_binding_is_handed_over(clean_states, monkeypatch, tmp_path, recwarn):
    library = tmp_path / "build" / "lib" / "libtessera_torch.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(_bindings, "_PACKAGE", tmp_path / "python" / "tessera")
    loaded = []
    assert _bindings.load("torch", loaded.append)
    assert loaded == [str(library)] and not recwarn and not _bindings._why_not


def test_front_ends_are_modules_of_the_package():
    """`import tessera` is enough to write tessera.torch, and loads no framework; other names are none."""
    code = """if True:
        import sys, tessera
        assert not {"torch", "jax", "paddle"} & sys.modules.keys()
        for name in ("torch", "jax", "paddle"):
            sys.modules[name] = None  # as if it were not installed
            try:
                getattr(tessera, name)
            except ImportError as error:
                assert name in str(error)
            else:
                raise AssertionError(name)
        assert not hasattr(tessera, "tensorflow")
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_front_end_is_imported_where_it_is_named():
    pytest.importorskip("torch")
    code = "import tessera; assert tessera.torch.attention.__module__.startswith('tessera.torch')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_env_shows_the_binding():
    pytest.importorskip("torch")
    assert re.match(r"loaded, /.*libtessera_torch\.so", _bindings.states()["torch"])


def test_torch_works_without_its_binding():
    """As a build without PyTorch leaves it: one warning, and the same results through ctypes."""
    pytest.importorskip("torch")
    program = """if True:
        import warnings
        from tessera import _bindings
        _bindings._place = lambda framework: None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import tessera.torch, tessera.torch._ops, torch
        assert [str(w.message) for w in caught if "tessera.torch: libtessera_torch.so" in str(w.message)], caught
        assert len([w for w in caught if "tessera" in str(w.message)]) == 1
        q = torch.randn(1, 8, 2, 16, requires_grad=True)
        tessera.torch.attention(q, q, q, causal=True).sum().backward()
        assert q.grad.isfinite().all()
        assert "was not built" in _bindings.states()["torch"]
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def build_backend():
    return pytest.importorskip("build_backend", exc_type=ImportError)


def test_the_build_says_how_long_it_takes(build_backend, capsys, monkeypatch):
    monkeypatch.setattr(build_backend.os, "sched_getaffinity", lambda _: range(2))
    build_backend._say_how_long({"cmake.define.TESSERA_CUDA": "on", "cmake.define.TESSERA_TORCH_DIR": "/torch"})
    build_backend._say_how_long({})
    first, second = capsys.readouterr().err.splitlines()
    assert first == "tessera: compiling the CPU library and the CUDA kernels and the PyTorch binding: " \
                    "about 14 min on 2 cores"
    assert "about 2 min" in second and "will be without its binding" in second


def test_the_build_finds_torch_where_pip_hides_it(build_backend, monkeypatch, tmp_path):
    monkeypatch.setattr(build_backend.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(build_backend.sysconfig, "get_path", lambda _: str(tmp_path))
    assert build_backend._with_torch({"a": "b"}) == {"a": "b"}
    (tmp_path / "torch" / "include").mkdir(parents=True)
    assert build_backend._with_torch(None) == {"cmake.define.TESSERA_TORCH_DIR": str(tmp_path / "torch")}
    given = {"cmake.define.TESSERA_TORCH_DIR": "/elsewhere"}
    assert build_backend._with_torch(given) == given


def test_release_list():
    import release_check
    wheels = [f"{folder}/tessera_attention-1.2.3-py3-none-manylinux_2_34_x86_64.whl"
              for folder in ("build/dist", "build/dist/cpu")]
    wheels.append("build/dist/aarch64/tessera_attention-1.2.3-py3-none-manylinux_2_34_aarch64.whl")
    dated = "# Changelog\n\n## 1.2.3, 2030-01-31\n"
    cited, links = "version: 1.2.3\nrepository-code: https://example.org/t\n", "[project.urls]\nSource = \"...\"\n"
    assert release_check.open_items("1.2.3", dated, cited, links, "", ["v1.2.2"], wheels) == []
    without, = release_check.open_items("1.2.3", dated, "version: 1.2.3\n", links, "", [], wheels)
    assert "needs repository-code" in without
    items = release_check.open_items("1.2.3", "## 1.2.3, unreleased", "version: 1.2.2\n", "[project]\n", " M a\n M b",
                                     ["v1.2.3"], wheels[:1])
    for words in ("must be a date", "must be 1.2.3", "2 files", "the tag v1.2.3 exists", "./dev wheel --cpu",
                  "./dev wheel --platform aarch64", "no [project.urls]"):
        assert any(words in item for item in items), (words, items)
    assert len(items) == 7


def test_the_citation_has_the_version():
    version = re.search(r"project\(tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\n" in citation
    for key in ("cff-version", "message", "title", "authors", "license"):  # the first four the format asks for
        assert re.search(rf"^{key}:", citation, re.MULTILINE), key


def test_package_page_has_no_relative_link():
    """The substitutions of pyproject.toml, as the build applies them."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "README.md").read_text()
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    assert not re.findall(r"\]\((?!https?://)", text)
    assert "[batch, seqlen, heads, head_dim]" in text  # what is no link stays


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


def test_prefix_of_a_checkout_is_refused():
    done = subprocess.run([sys.executable, "-m", "tessera", "env", "--prefix"], capture_output=True, text=True)
    assert done.returncode == 2 and "cmake --install build/cpu --prefix" in done.stderr
