#!/usr/bin/env bash
# All work on a machine with one GPU, in under 8 minutes: are the kernels right there, how fast are they, what does a
# decode step cost. Needs jax with CUDA and the core dependencies, nothing else.
#
#   scripts/device_check.sh RESULTS            # results as files in the folder RESULTS
#   scripts/device_check.sh --dry-run RESULTS  # the same parts as far as a CPU can: byte model, small models
#
# Every part has its own time limit; one that fails is recorded and the rest still run. The last lines are the summary
# (also RESULTS/summary.json); the exit status is 1 if any part failed. PYTHON chooses the interpreter.
set -uo pipefail

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

dry=false
if [ "${1:-}" = "--dry-run" ]; then
    dry=true
    shift
fi
[ $# -eq 1 ] || usage
case "$1" in -*) usage ;; esac

cd "$(dirname "$0")/.." || exit 2
mkdir -p "$1" || exit 2
results=$(cd "$1" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

names=()
states=()
failed=0

# part NAME SECONDS COMMAND...: stdout to NAME.out, stderr to NAME.err, the last line of stdout, JSON, to NAME.json.
part() {
    local name=$1 limit=$2 began=$SECONDS status state
    shift 2
    echo "== $name (at most $limit s): $*"
    timeout --kill-after=10 "$limit" "$@" >"$results/$name.out" 2>"$results/$name.err"
    status=$?
    case $status in
        0) state=ok ;;
        124 | 137) state="not done after $limit s" ;;
        *) state="exit status $status" ;;
    esac
    tail -n 1 "$results/$name.out" >"$results/$name.json"
    if ! "$python" -m json.tool "$results/$name.json" >/dev/null 2>&1; then
        rm -f "$results/$name.json"
        [ "$state" = ok ] && state="no JSON in its last line"
    fi
    if [ "$state" != ok ]; then
        failed=1
        tail -n 5 "$results/$name.err"
    fi
    names+=("$name")
    states+=("$state, $((SECONDS - began)) s")
    echo "   $state, $((SECONDS - began)) s"
}

platform="import jax; d = jax.devices()[0]; import json"
platform="$platform; print(json.dumps({'platform': d.platform, 'device': d.device_kind, 'jax': jax.__version__}))"
if $dry; then
    part device 60 "$python" -c "$platform"
    part check 240 "$python" scripts/bench_kernels.py --check --interpret --quick
    part kernels 60 "$python" scripts/bench_kernels.py
    part decode 240 "$python" scripts/bench_decode.py --random-init qwen3.5-0.8b --layers 4 --vocab 512 \
        --forced-acceptance 0.8,0.7,0.6 --concurrency 1 --policies fixed1 --repetitions 1 --max-new-tokens 16
else
    # A CPU would pass the parts below in its own way and prove nothing about a GPU.
    part device 30 "$python" -c "$platform; assert d.platform == 'gpu', f'this is a {d.platform}; see --dry-run'"
    if [ "$failed" = 0 ]; then
        # A budget ends a part in order, with what it has and a list of what is left; the limit is for a part that hangs.
        part check 140 "$python" scripts/bench_kernels.py --check --budget 110
        part kernels 150 "$python" scripts/bench_kernels.py --budget 120
        part decode 150 "$python" scripts/bench_decode.py --random-init qwen3.5-4b \
            --forced-acceptance 0.8,0.7,0.6 --concurrency 1 8 32 --policies fixed1 fixed3 --repetitions 3
    else
        names+=(check kernels decode)
        states+=("not run" "not run" "not run")
    fi
fi
if command -v nvidia-smi >/dev/null 2>&1; then
    nvidia-smi >"$results/nvidia-smi.txt" 2>&1
fi

echo "== summary, $SECONDS s in all"
{
    printf '{"date": "%s", "dry_run": %s, "seconds": %d, "failed": %s, "parts": {' \
        "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$dry" "$SECONDS" "$([ "$failed" = 0 ] && echo false || echo true)"
    for i in "${!names[@]}"; do
        [ "$i" = 0 ] || printf ', '
        printf '"%s": "%s"' "${names[$i]}" "${states[$i]}"
    done
    printf '}}\n'
} | tee "$results/summary.json"
for i in "${!names[@]}"; do
    printf '%-12s %s\n' "${names[$i]}" "${states[$i]}"
done
exit "$failed"
