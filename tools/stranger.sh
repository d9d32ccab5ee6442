#!/usr/bin/env bash
# Does what the README tells a newcomer to do: runs each command of its section "In ten minutes" in a clean environment, away
# from the source, with the wheel in place of the clone. Usage: tools/stranger.sh WHEEL
set -euo pipefail
wheel=$(realpath "$1")
cd "$(dirname "$0")/.."
root=$PWD
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
begun=$SECONDS

section=$(sed -n '/^## In ten minutes$/,/^## [^I]/p' README.md)
commands=$(sed -n 's/^\$ //p' <<<"$section")
grep -q '^pip install' <<<"$commands" || { echo "README has no section 'In ten minutes' that begins with pip install"; exit 1; }
mkdir "$room/clone"
cp -r examples "$room/clone"
cd "$room/clone"
python3 -m venv "$room/environment"
export PATH="$room/environment/bin:$PATH" XDG_CACHE_HOME="$room/cache" OMP_NUM_THREADS=1 TQDM_DISABLE=1
unset PYTHONPATH
pip install --quiet torch==2.13.0
while IFS= read -r line <&3; do
    echo "\$ $line"
    bash -c "${line//"'.[torch]'"/"'$wheel[torch]' --quiet"}" >"$room/output" 2>&1 || { cat "$room/output"; exit 1; }
done 3<<<"$commands"
python -c "import torch; assert torch.__version__.startswith('2.13.0'), 'the torch that was there was replaced'"
python -c "import stowplan; assert not stowplan.__file__.startswith('$root'), 'the source was used, not the wheel'"
for page in stowplan-demo/gpt.html half.html; do
    test -s "$page" || { echo "README's commands wrote no $page"; exit 1; }
done
echo "a stranger with the README was done after $((SECONDS - begun)) s"
