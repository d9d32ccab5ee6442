#!/usr/bin/env bash
# Does what the README and the tutorial tell a newcomer to do: runs each command of the README, then each of the
# tutorial's section "More in a clone", in a pseudo-terminal, in a clean environment, in a clone without the source, whose
# folder has a blank in its name. The wheel takes the place of the source.
# Usage: tools/stranger.sh WHEEL
set -euo pipefail
wheel=$(realpath "$1")
cd "$(dirname "$0")/.."
root=$PWD
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
begun=$SECONDS

section=$(sed -n '/^## More in a clone$/,/^## [^M]/p' docs/tutorial.md)
commands=$(sed -n 's/^\$ //p' README.md; sed -n 's/^\$ //p' <<<"$section")
for line in "pip install '.\[torch\]'" "stowplan watch " "stowplan run " "pytest "; do
    grep -q "^$line" <<<"$commands" || { echo "neither README nor the tutorial has a command like $line"; exit 1; }
done
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
    test -s "$page" || { echo "the tutorial's lines wrote no $page"; exit 1; }
done
echo "a stranger with the README was done after $((SECONDS - begun)) s"
