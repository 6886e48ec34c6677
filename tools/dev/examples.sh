# SPDX-License-Identifier: Apache-2.0
# A part of ./dev: lists the programs of examples/, and runs one after what it needs is installed and built.

# FILE|NEEDS|WHAT of each, from its line `example (NEEDS): WHAT`: packages, or the libraries that a C program links.
examples() {
  grep -rm1 --include='*.py' --include='*.c' --include='*.cc' -E '^(#|//| \*) example \(' examples | sort |
    sed -E 's#^examples/([^:]*):[^(]*\(([^)]*)\): (.*)#\1|\2|\3#'
}

# The name of an example from its path, whole or not: torch/vit, serve.
example_name() {
  local name=${1#examples/}
  name=${name%.*}
  name=${name%/}
  echo "${name%/__main__}"
}

example() {
  local wanted all line file needs what
  mapfile -t all < <(examples)
  wanted=$(example_name "${1:-}")
  [ -n "$wanted" ] || echo "usage: ./dev example NAME [ARGUMENTS]; --help among these says what a program takes"
  for line in "${all[@]}"; do
    IFS='|' read -r file needs what <<<"$line"
    if [ -z "$wanted" ]; then printf '  %-20s %s; needs %s\n' "$(example_name "$file")" "$what" "${needs// /, }"
    elif [ "$(example_name "$file")" = "$wanted" ]; then run_example "$file" "$needs" "${@:2}"; fi
  done
  [ -z "$wanted" ] || die "example $wanted: no such example; ./dev example lists them"
}

# run_example FILE NEEDS ARGS...: in the place of this script.
run_example() {
  local file=examples/$1 needs=$2 libraries=(tessera) need host=; shift 2
  for need in $needs; do
    case $need in
      torch) setup_torch; libraries+=(tessera_torch) ;;
      jax) has_jax || die "$file: JAX needs Python 3.11 or later"; setup_jax; libraries+=(tessera_jax) ;;
      paddle) has_paddle || die "$file: no Paddle for this Python"; venv=$venv_paddle; setup_paddle ;;
      matplotlib) install plots matplotlib ;;
      accelerate|kernels|trl|diffusers|xfuser|megatron|deepspeed|vllm) host=$need ;;
      tessera_*) libraries+=("$need") ;;
    esac
  done
  case $file in
    *.py)
      built "${libraries[@]}" || build cpu "${libraries[@]}"
      [ -z "$host" ] || setup_host "$host"
      export KINETO_LOG_LEVEL=${KINETO_LOG_LEVEL:-9}  # PyTorch's profiler says on stderr that a CPU has no GPU
      exec "$venv/bin/python" "${file%/__main__.py}" "$@" ;;
  esac
  local program=build/example compiler=(c++ -std=c++17); [[ $file = *.cc ]] || compiler=(cc -std=c11)
  quick "$(fp32_level)" "${libraries[@]}"
  "${compiler[@]}" -Iinclude "-I$(dirname "$file")" "$file" -o $program -Lbuild/lib "-Wl,-rpath,$root/build/lib" \
    "${libraries[@]/#/-l}"
  exec $program "$@"
}
