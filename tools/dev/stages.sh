# SPDX-License-Identifier: Apache-2.0
# A part of ./dev: stages of `test` one after another or beside each other, how long each took, and what each said last.

# What each stage took and what each runner said last, shown again at the end. In files, as a stage may run in a process
# of its own (`beside`).
stages=build/stages.log summaries=build/summaries.log
start_summaries() {
  mkdir -p build
  : >$stages >$summaries
  trap finish EXIT
}
summary() { echo "$*" >>$summaries; }
show_summaries() {
  [ ! -s $stages ] || { say "seconds of each stage, and cores that it kept busy"; cat $stages; }
  [ ! -s $summaries ] || { say summary; cat $summaries; }
}
finish() {
  [ -z "$other" ] || kill -- -"$other" 2>/dev/null || true
  show_summaries
}

# summarised NAME COMMAND...: runs it, and keeps its last line that counts what passed and failed.
summarised() {
  local name=$1 status=0; shift
  mkdir -p build
  "$@" 2>&1 | tee build/"$name".log || status=$?
  summary "$name: $(grep -E 'passed|failed|error' build/"$name".log | tail -1 || true)"
  return $status
}

# stage COMMAND...: its seconds, and how many cores its processes kept busy meanwhile.
stage() {
  local started=$SECONDS shell=$BASHPID before
  before=$(core_seconds "$shell")
  "$@"
  awk -v name="${1#test_}${2:+ $2}" -v took=$((SECONDS - started)) -v before="$before" \
    -v after="$(core_seconds "$shell")" \
    'BEGIN { printf "%s %d, %.1f cores\n", name, took, took ? (after - before) / took : 0 }' >>$stages
}

# core_seconds SHELL: of it and of all processes that it waited for; 0 where there is no /proc.
core_seconds() {
  awk -v ticks="$(getconf CLK_TCK)" '{ sub(/.*[)] /, ""); print ($12 + $13 + $14 + $15) / ticks }' \
    "/proc/$1/stat" 2>/dev/null || echo 0
}

# beside STAGES...: each a command, one after another in a process of its own, which takes what the stages in front leave
# idle: pip keeps one core busy, pytest one and a half. They must not touch build/cpu, nor install anything. `join` waits
# for them and shows their log.
other=
beside() {
  say "beside the next stages, in build/beside.log: ${*#test_}"
  set -m  # a group of processes, which `finish` ends
  (
    other=
    renice -n 10 -p $BASHPID >/dev/null
    for name in "$@"; do stage $name; done
  ) >build/beside.log 2>&1 &
  other=$!
  set +m
}
join() {
  [ -n "$other" ] || return 0
  local started=$SECONDS status=0
  wait "$other" || status=$?
  other=
  cat build/beside.log
  echo "waiting for the stages beside $((SECONDS - started))" >>$stages
  return $status
}
