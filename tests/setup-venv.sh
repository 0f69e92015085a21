#!/usr/bin/env bash
# setup-venv.sh PYTHON DIR: create the virtual environment of requirements.lock, whole or not at all.
set -euo pipefail
python=$1 target=$2
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed, '$python' is $("$python" -V 2>&1); set PYTHON=" >&2
    exit 1
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian splits venv from python3.
    command -v apt-get >/dev/null || { echo "error: $python has no venv module; install it" >&2; exit 1; }
    apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv
fi
echo "creating the Python environment in $target"
mkdir -p "$(dirname "$target")"
exec 9>"$target.lock"
flock 9
[ ! -e "$target/.complete" ] || exit 0
rm -rf "$target"
"$python" -m venv "$target"
"$target/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
touch "$target/.complete"
