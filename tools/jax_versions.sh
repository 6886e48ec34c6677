#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The built libtessera_jax under the oldest and the newest JAX that pip gives for this Python, and our
# declarations beside the header of the newest jaxlib for any Python. Needs the network.
#   tools/jax_versions.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
work=$PWD/build/jax-versions
mkdir -p "$work"

for version in "jax==0.10.0" "jax>=0.10"; do
  venv=$work/${version//[^a-z0-9]/-}
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --upgrade "$version" flax numpy pytest hypothesis ml_dtypes rich
  "$venv/bin/python" -c 'import jax, jaxlib; print("jax", jax.__version__, "jaxlib", jaxlib.__version__)'
  PYTHONPATH=python "$venv/bin/python" -m pytest tests/python/on_jax/test_jax.py -p no:cacheprovider \
    -k "not check_through and not vmap_is_one_call"
done

for other in 3.12 3.13 3.14; do
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version $other --dest "$work/$other" jaxlib || continue
  wheel=$(ls "$work/$other"/*.whl | tail -1)
  "$python" -m zipfile -e "$wheel" "$work/$other"
  c++ -std=c++20 -fsyntax-only -Ipython/bindings -isystem "$work/$other/jaxlib/include" tests/jax/abi_test.cc
  echo "$(basename "$wheel"): the interface is as declared"
  rm -rf "${work:?}/$other"
done
