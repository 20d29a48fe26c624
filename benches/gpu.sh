#!/usr/bin/env bash
# Everything that needs a GPU, in at most four minutes, on a machine with one GPU, Python 3.12, torch,
# CuPy, pytest and hypothesis; no Rust and no network.
#
#   benches/gpu.sh [--rehearse] [WHEEL]     WHEEL: kvmmu-*-abi3-*.whl (default: the newest in dist/)
#
# Installs the wheel into a folder of its own, runs the tests marked gpu, dist/pool-bench (POOL_BENCH
# names another; docs/development.md builds both), the measurements of gpu.py, and prints one table
# last. OUT names the folder for gpu.json and threads.jsonl (default: gpu-out). A part that fails, is
# missing or has no time left does not keep the others from running; then the exit status is 1.
#
# --rehearse runs the same on any machine, with the kvmmu that Python finds, in the CPU shim.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
out=${OUT:-gpu-out}
rehearse=()
if [ "${1:-}" = --rehearse ]; then
    rehearse=(--rehearse)
    shift
fi
mkdir -p "$out"
failed=0
left() { echo $((${LIMIT:-200} - SECONDS)); }

if [ ${#rehearse[@]} -eq 0 ]; then
    wheel=${1:-$(ls -t dist/kvmmu-*abi3*.whl 2>/dev/null | head -n 1)}
    if [ ! -f "$wheel" ]; then
        echo "gpu.sh: no wheel: build one with maturin (docs/development.md) and name it" >&2
        exit 2
    fi
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheel" || exit 2
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    timeout 75 "$python" -m pytest -q -W default -m gpu tests/test_cuda_device.py || failed=1
else
    "$python" -m pytest -q -m "not gpu" tests/test_cuda_device.py -k "checksums" || failed=1
fi

# What threads.sh measures, by a program that was built before, in fewer rounds: about 1.5 seconds for
# each number of threads. What it has measured by its time limit counts.
program=${POOL_BENCH:-dist/pool-bench}
: > "$out/threads.jsonl"
if [ -x "$program" ]; then
    cores=$(nproc)
    timeout 40 "$program" threads --threads $((cores < 16 ? cores : 16)) --rounds 15 --warm-ms 1000 \
        > "$out/threads.jsonl" || { echo "gpu.sh: $program failed: $?" >&2; failed=1; }
else
    echo "gpu.sh: threads are not measured: there is no program $program" >&2
    failed=1
fi

seconds=$(($(left) - 20))
timeout $(($(left) > 1 ? $(left) + 20 : 21)) "$python" benches/gpu.py "${rehearse[@]}" \
    --seconds "$seconds" --threads "$out/threads.jsonl" --json "$out/gpu.json" || failed=1
echo "gpu.sh: $SECONDS s; rows in $out/gpu.json"
exit $failed
