# SPDX-License-Identifier: Apache-2.0
"""tessera_nvte.h beside the header in PyPI's newest source distribution of transformer_engine_torch: names, values and
their order, signatures, setters. The next version of TransformerEngine is seen here first."""
import io
import json
import re
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INDEX = "https://pypi.org/pypi/transformer_engine_torch/json"
HEADERS = "common_headers/common/include/transformer_engine/"
OURS_ALONE = {"NVTE_F16_max512_seqlen"}  # of earlier versions, whose programs name it

compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(compiler is None, reason="no C++ compiler in PATH")


# ---- headers as data ----

def declared(text: str) -> dict:
    """{"enums": {enum: {name: value}}, "functions": {name: types}, "setters": {class: {name: type}}} of a header whose
    macros are expanded; tessera's prefix is left out, and what a linker does not see."""
    text = re.sub(r"\btessera_nvte_(?!names)", "nvte_", text)
    text = re.sub(r"__attribute__\(\(.*?\)\)\)?|\bnoexcept\b|\b(?:inline|explicit|virtual)\b", " ", text)
    enums = {}
    for name, body in re.findall(r"\benum (?:class )?(\w+)[^{;]*\{(.*?)\}", text, re.S):
        value, enums[name] = -1, {}
        for entry in filter(None, map(str.strip, body.split(","))):
            word, _, given = map(str.strip, entry.partition("="))
            value = int(given, 0) if given else value + 1
            enums[name][word] = value
    functions = {name: (result.strip(), types_of(arguments)) for result, name, arguments in
                 re.findall(r"((?:const )?\b\w+\s*\*?\s+)\*?(nvte_\w+)\(([^()]*)\)\s*;", text)}
    setters = {}
    for name, body in re.findall(r"\bclass (\w+Wrapper)\b[^{;]*\{(.*?)\n?\};", text, re.S):
        setters[name] = {setter: types_of(argument)[0]
                         for setter, argument in re.findall(r"&\s*(set_\w+)\(([^(),]*\bval)\)", body)}
    return {"enums": enums, "functions": functions, "setters": {k: v for k, v in setters.items() if v}}


def types_of(arguments: str) -> tuple[str, ...]:
    """ "const NVTETensor &q, int b" -> ("const NVTETensor&", "int")"""
    found = []
    for argument in filter(lambda a: a.strip() not in ("", "void"), arguments.split(",")):
        kind = re.sub(r"\b\w+\s*$", "", argument.strip()) if len(argument.split()) > 1 or "*" in argument else argument
        kind = re.sub(r"\s*([*&])\s*", r"\1", " ".join(kind.split()))
        # const of an argument that is passed by value is not part of a signature.
        found.append(kind if kind[-1:] in "*&" else kind.removeprefix("const "))
    return tuple(found)


def differences(ours: dict, theirs: dict) -> list[str]:
    """What of theirs ours lacks or says otherwise, each on a line."""
    found = []
    for name, entries in theirs["enums"].items():
        mine = {word: value for word, value in ours["enums"].get(name, {}).items() if word not in OURS_ALONE}
        if list(mine.items()) != list(entries.items()):
            both = sorted(set(mine.items()) ^ set(entries.items()), key=lambda entry: (entry[1], entry[0]))
            found.append(f"enum {name}: {both or 'another order'}")
    for kind in ("functions", "setters"):
        for name, what in theirs[kind].items():
            mine = ours[kind].get(name)
            if kind == "setters" and mine is not None:
                changed = sorted(setter for setter in {*mine, *what} if mine.get(setter) != what.get(setter))
                found += [f"{name}.{setter}: theirs {what.get(setter)}, ours {mine.get(setter)}" for setter in changed]
            elif mine != what:
                found.append(f"{name}: theirs {what}, ours {mine}")
    return found


def expanded(text: str) -> str:
    """After the preprocessor, without what <> and other packages' headers bring along."""
    text = re.sub(r'^\s*#\s*include\s*(<.*|"(?!tessera_nvte).*)$', "", text, flags=re.M)
    return subprocess.run([compiler, "-E", "-P", "-x", "c++", "-I", ROOT / "include", "-"], input=text, text=True,
                          check=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def ours():
    return declared(expanded((ROOT / "include/tessera_nvte.h").read_text()))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(version, folder) of the newest headers; none without a way to PyPI."""
    def get(url):
        with urllib.request.urlopen(url, timeout=15) as answer:
            return answer.read()
    try:
        index = json.loads(get(INDEX))
        url, = (each["url"] for each in index["urls"] if each["packagetype"] == "sdist")
        packed = get(urllib.parse.urljoin(INDEX, url))
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        pytest.skip(f"PyPI's transformer_engine_torch cannot be had: {error}")
    folder = tmp_path_factory.mktemp("theirs")
    version = index["info"]["version"]
    (folder / "transformer_engine").mkdir()
    with tarfile.open(fileobj=io.BytesIO(packed)) as sources:
        for name in ("transformer_engine.h", "fused_attn.h"):
            text = sources.extractfile(f"transformer_engine_torch-{version}/{HEADERS}{name}").read()
            (folder / "transformer_engine" / name).write_bytes(text)
    # All that these headers say of CUDA.
    (folder / "cuda_runtime_api.h").write_text("typedef struct CUstream_st* cudaStream_t;\n")
    return version, folder


# ---- the comparison ----

def test_our_header_has_what_theirs_has(ours, theirs):
    version, folder = theirs
    their = declared(expanded((folder / "transformer_engine/fused_attn.h").read_text()))
    assert len(their["enums"]) >= 10 and len(their["functions"]) >= 40 and len(their["setters"]) >= 3, \
        "the header was not understood"
    found = differences(ours, their)
    assert not found, f"fused_attn.h of TransformerEngine {version}:\n" + "\n".join(found)


def test_our_tensors_are_theirs(ours, theirs):
    version, folder = theirs
    their = declared(expanded((folder / "transformer_engine/transformer_engine.h").read_text() +
                              (folder / "transformer_engine/fused_attn.h").read_text()))
    for kind in ("enums", "functions"):
        unknown = sorted(set(ours[kind]) - set(their[kind]))
        assert not unknown, f"not in TransformerEngine {version}: {unknown}"
    used = {kind: {name: their[kind][name] for name in ours[kind]} for kind in ("enums", "functions")}
    assert not differences(ours, {**used, "setters": {}}), version


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_the_example_is_a_program_of_theirs(theirs, standard):
    """It compiles against either header."""
    for include in (theirs[1], ROOT / "examples/nvte"):
        subprocess.run([compiler, f"-std={standard}", "-fsyntax-only", "-I", include, "-I", ROOT / "include",
                        ROOT / "examples/nvte/attention.cc"], check=True)


def test_both_headers_in_one_source(theirs):
    for names in ("", "#define TESSERA_NVTE_NO_NAMES\n"):
        text = (f'#include <transformer_engine/fused_attn.h>\n{names}#include <tessera_nvte.h>\n'
                'int main() { tessera_nvte_fused_attn_fwd_v2(nullptr); FusedAttnConfigWrapper config; }\n')
        subprocess.run([compiler, "-std=c++17", "-fsyntax-only", "-I", theirs[1], "-I", ROOT / "include", "-x", "c++",
                        "-"], input=text, text=True, check=True)


# ---- that it can fail ----

HEADER = """
enum A { kX = 0, kY, kZ = 7, };
void nvte_f(const NVTETensor Q, const NVTETensor &k, NVTETensorPack *pack, size_t n, bool b);
NVTEConfig nvte_make(void);
class FWrapper {
 public:
  FWrapper &set_q(NVTETensor val) noexcept { return set_attr(kX, val); }
  FWrapper &set_pack(const NVTETensorPack *val) noexcept { return set_attr(kX, val); }
};
"""


def test_what_is_read():
    assert declared(HEADER) == {
        "enums": {"A": {"kX": 0, "kY": 1, "kZ": 7}},
        "functions": {"nvte_f": ("void", ("NVTETensor", "const NVTETensor&", "NVTETensorPack*", "size_t", "bool")),
                      "nvte_make": ("NVTEConfig", ())},
        "setters": {"FWrapper": {"set_q": "NVTETensor", "set_pack": "const NVTETensorPack*"}}}


@pytest.mark.parametrize("old, new, says", [
    ("kY,", "", "enum A"), ("kX = 0, kY", "kY = 0, kX", "enum A"), ("kZ = 7", "kZ = 8", "enum A"),
    ("kZ = 7,", "kZ = 7, kNew,", "enum A"), ("size_t n, bool b", "bool b, size_t n", "nvte_f"),
    ("NVTETensor &k", "NVTETensor k", "nvte_f"), ("nvte_make", "nvte_made", "nvte_made"),
    ("set_q(NVTETensor val", "set_q(NVTETensor *val", "FWrapper"),
    ("  FWrapper &set_q", "  FWrapper &set_r(int val) {} FWrapper &set_q", "set_r")])
def test_a_change_of_theirs_is_seen(old, new, says):
    assert not differences(declared(HEADER), declared(HEADER))
    found = differences(declared(HEADER), declared(HEADER.replace(old, new)))
    assert len(found) == 1 and says in found[0], found
