#!/usr/bin/env bash
# Run everything that needs a GPU, in less than eight minutes; or the sections that are named.
#
#     benchmarks/gpu/all.sh [tests] [sanitize] [kernels] [training]
#
# PYTHON: an interpreter that has the package, torch and pytest; default: .venv's, else python3.
# OUT: folder of results; default: build/gpu. It gets all.log, and all.jsonl with an object a line:
# one for each command, with its exit code and time, one for each contestant of the training, and
# the kernels' table. Every command has a time limit of its own, and what it found is kept.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-build/gpu}
ARRAYS=tests/gpu/test_arrays_on_device.py
SECTIONS=(tests sanitize kernels training)
TABLE=()
FAILED=0

# Run a command for at most so many seconds, and note how it ended.
run() { # NAME LIMIT_S COMMAND...
  local name=$1 limit_s=$2 begin=$EPOCHREALTIME code seconds outcome
  shift 2
  printf '\n== %s (at most %s s): %s\n' "$name" "$limit_s" "$*"
  timeout --kill-after=5 "$limit_s" "$@" 2>&1 | tee "$OUT/last.txt"
  code=${PIPESTATUS[0]}
  seconds=$(awk -v begin="$begin" -v end="$EPOCHREALTIME" 'BEGIN { printf "%.1f", end - begin }')
  case $code in
    0) outcome=passed ;;
    124 | 137) outcome="out of time" ;;
    *) outcome="exit code $code" ;;
  esac
  [ "$code" -eq 0 ] || FAILED=1
  printf '{"section": "%s", "exit_code": %d, "seconds": %s}\n' "$name" "$code" "$seconds" \
    >> "$OUT/all.jsonl"
  TABLE+=("$(printf '%-26s %-13s %6s s  %s' "$name" "$outcome" "$seconds" "$(counts)")")
}

# What pytest or the sanitizer says last, if it was one of them.
counts() {
  grep -aoE '([0-9]+ (passed|failed|skipped|error)[^=]*|ERROR SUMMARY.*|RACECHECK SUMMARY.*)' \
    "$OUT/last.txt" | tail -1 | sed 's/ in [0-9.]*s.*//'
}

on_ranks() { # RANKS FILE...
  local ranks=$1
  shift
  run "contract, $ranks ranks" 60 "$PYTHON" -m qsgd_hpc run -np "$ranks" "$PYTHON" -m pytest -q \
    -p no:cacheprovider -p tests.ranks --timeout 50 "$@"
}

# The kernels' tests, those of DDP and FSDP2 on 4 ranks, those of CuPy and JAX, and the contract
# with tensors on the GPU.
tests() {
  local ranks
  run "kernels' tests" 60 "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider -p no:benchmark \
    -n auto -k device --ignore "$ARRAYS"
  run "arrays of CuPy and JAX" 150 "$PYTHON" -m pytest "$ARRAYS" -q -p no:cacheprovider -k a_gpu
  run "the hook's tests" 150 "$PYTHON" -m pytest tests/ddp -q -p no:cacheprovider \
    -k 'device and not host'
  for ranks in 1 2 4; do
    on_ranks "$ranks" tests/contract/test_torch_device.py tests/contract/test_arrays.py \
      tests/contract/test_collectives.py tests/contract/test_gradients.py \
      -k 'torch.cuda or device'
  done
}

# Memory by all of the kernels' tests; races, which takes longer, by those of lanes and warps that
# exchange data.
EXCHANGING="every_bucket or many_tensors or fused or residual or feedback"
sanitize() {
  if ! command -v compute-sanitizer > /dev/null; then
    TABLE+=("sanitize                   not run        compute-sanitizer is not on PATH")
    return
  fi
  sanitize_by memcheck device
  sanitize_by racecheck "device and ($EXCHANGING)"
}

sanitize_by() { # TOOL TESTS
  run "$1" 75 compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 9 \
    "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider -x -k "$2" --ignore "$ARRAYS"
}

kernels() {
  run "kernels' speed" 60 "$PYTHON" benchmarks/gpu/kernels.py --json "$OUT/gpu-kernels.json"
  if [ -s "$OUT/gpu-kernels.json" ]; then
    tr -d '\n' < "$OUT/gpu-kernels.json" | sed 's/^{/{"section": "kernels",/' >> "$OUT/all.jsonl"
    echo >> "$OUT/all.jsonl"
  fi
}

training() {
  local ranks
  for ranks in 2 4; do
    run "training, $ranks ranks" 100 "$PYTHON" -m qsgd_hpc run -np "$ranks" "$PYTHON" \
      benchmarks/gpu/training.py --json "$OUT/all.jsonl" --seconds 3
  done
}

main() {
  local section
  for section in "${@:-${SECTIONS[@]}}"; do
    case " ${SECTIONS[*]} " in
      *" $section "*) ;;
      *) echo "all.sh: no section '$section': choose from ${SECTIONS[*]}" >&2 && exit 2 ;;
    esac
  done
  if ! "$PYTHON" -c 'from tests.gpu.memory import has_device; raise SystemExit(not has_device())'; then
    echo "all.sh: $PYTHON has no GPU that torch can use, or no kernels for it (docs/gpu.md)" >&2
    exit 2
  fi
  [ $# -gt 0 ] || set -- "${SECTIONS[@]}"
  : > "$OUT/all.jsonl"
  for section in "$@"; do "$section"; done
  printf '\n%s\n' "${TABLE[@]}"
  echo "$OUT/all.jsonl and $OUT/all.log have it all"
  exit "$FAILED"
}

mkdir -p "$OUT"
main "$@" 2>&1 | tee "$OUT/all.log"
