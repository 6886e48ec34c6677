# SPDX-License-Identifier: Apache-2.0
# A part of ./dev: the fuzzers of tests/fuzz.

fuzzers=(structs cases text utilities nvte)
have_fuzzer() { echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
  clang++ -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null; }
# Debian has libFuzzer and the sanitizers in a package of clang's version.
install_fuzzer() {
  have_fuzzer || { apt_install clang && apt_install "libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev"; }
  have_fuzzer
}

# fuzz SECONDS: each fuzzer its share of them, as many at once as there are cores. What it found lies in build/fuzz/found,
# what it learnt in build/fuzz/corpus.
fuzz() {
  local share=$((${1:-60} / ${#fuzzers[@]}))
  [ "$share" -gt 0 ] || die "fuzz $1: at least ${#fuzzers[@]} seconds"
  build fuzz fuzzers
  mkdir -p build/fuzz/found
  say "fuzz ${fuzzers[*]}, $share s each, $(nproc) at once"
  export -f fuzz_one summary
  export venv summaries
  printf '%s\n' "${fuzzers[@]}" | xargs -P "$(nproc)" -I{} bash -c "fuzz_one {} $share"
}

# fuzz_one NAME SECONDS: a fuzzer keeps one core busy.
fuzz_one() {
  local name=$1 failed=
  "$venv/bin/python" tests/fuzz/corpus.py unpack "tests/fuzz/corpus/$name.txt" "build/fuzz/corpus/$name" || return
  build/fuzz/tests/fuzz/"fuzz_$name" -max_total_time="$2" -timeout=25 -rss_limit_mb=2048 -max_len=1024 \
    -entropic=0 -dict=tests/fuzz/words.dict -print_final_stats=1 -verbosity=0 \
    -artifact_prefix=build/fuzz/found/"$name-" "build/fuzz/corpus/$name" >build/fuzz/"$name".log 2>&1 ||
    { failed=", failed"; tail -60 build/fuzz/"$name".log; }
  summary "fuzz-$name: $(sed -n 's/stat::number_of_executed_units: *//p' build/fuzz/"$name".log) executions$failed"
  [ -z "$failed" ]
}
