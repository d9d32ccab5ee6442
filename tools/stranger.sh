#!/usr/bin/env bash
# Does what the README tells a newcomer to do: runs each command of its section "In ten minutes" in a pseudo-terminal, in a clean
# environment, in a clone without the source, whose folder has a blank in its name. The wheel takes the place of the source.
# Usage: tools/stranger.sh WHEEL
set -euo pipefail
wheel=$(realpath "$1")
cd "$(dirname "$0")/.."
root=$PWD
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
begun=$SECONDS

section=$(sed -n '/^## In ten minutes$/,/^## [^I]/p' README.md)
commands=$(sed -n 's/^\$ //p' <<<"$section")
grep -q "^pip install '.\[torch\]'" <<<"$commands" || { echo "README has no section 'In ten minutes' that begins with pip install"; exit 1; }
clone="$room/new user/clone"
mkdir -p "$clone"
for entry in *; do
    case $entry in src | build | dist) ;; *) cp -r "$entry" "$clone" ;; esac
done
cd "$clone"
python3 -m venv "$room/new user/environment"
export PATH="$room/new user/environment/bin:$PATH" XDG_CACHE_HOME="$room/new user/cache" OMP_NUM_THREADS=1
export SHELL=/bin/bash TERM=xterm
unset PYTHONPATH
pip install --quiet torch==2.13.0
while IFS= read -r line <&3; do
    echo "\$ $line"
    script --quiet --return --command "${line/"'.[torch]'"/"'$wheel[torch]'"}" "$room/output" </dev/null >/dev/null ||
        { cat "$room/output"; exit 1; }
done 3<<<"$commands"
python -c "import torch; assert torch.__version__.startswith('2.13.0'), 'the torch that was there was replaced'"
python -c "import stowplan; assert not stowplan.__file__.startswith('$root'), 'the source was used, not the wheel'"
for page in stowplan-demo/gpt.html half.html; do
    test -s "$page" || { echo "README's commands wrote no $page"; exit 1; }
done
echo "a stranger with the README was done after $((SECONDS - begun)) s"
