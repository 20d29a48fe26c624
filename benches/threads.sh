#!/usr/bin/env bash
# One block, claimed and released by 1, 2, ... threads at a time, as many as there are cores (at most
# 16): the pool and its rivals. JSON lines on stdout (benches/pool/src/report.rs has the format), how
# many cores there are on stderr.
#
#   benches/threads.sh [LLFREE]      LLFREE: a checkout of LLFree (Rust)
#
# Needs cargo and Python 3.11. PYTHON names another interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

cores=$(nproc)
threads=$((cores < 16 ? cores : 16))
echo "threads.sh: $cores cores: 1 to $threads threads" >&2
if [ $# -gt 0 ] && [ ! -f "$1/core/Cargo.toml" ]; then
    echo "threads.sh: $1: core/Cargo.toml is not there" >&2
    exit 2
fi
exec "${PYTHON:-python3}" "$here/pool.py" "$threads" "$@"
