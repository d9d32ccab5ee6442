#!/usr/bin/env bash
# Builds the wheel and uses it in two clean environments, away from the source: without torch it reads, plans and reports
# on files; beside torch it goes through what the README tells a newcomer to do (tools/stranger.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

python3 -m venv "$room/build"
"$room/build/bin/pip" install --quiet build hatchling
for folder in dist again; do
    "$room/build/bin/python" -m build --quiet --no-isolation --wheel --outdir "$room/$folder" "$root"
done
wheel=$(echo "$room"/dist/*.whl)
cmp "$wheel" "$room"/again/*.whl || { echo "two builds of one source differ"; exit 1; }
cp tests/formats/samples/{chainer.txt,onnx.onnx,torch_trace.json,torch_snapshot.pickle} "$room"

cd "$room"
python3 -m venv plain
plain/bin/pip install --quiet "$wheel"
for file in chainer.txt onnx.onnx torch_trace.json torch_snapshot.pickle; do
    plain/bin/stowplan inspect "$file" >/dev/null
done
plain/bin/stowplan plan chainer.txt --saved retain --budget 1GiB -o plan.json >/dev/null
plain/bin/stowplan report plan.json -o page.html >/dev/null
plain/bin/stowplan doctor && { echo "doctor finds torch where there is none"; exit 1; }
! plain/bin/python -c "import torch" 2>/dev/null
echo "without torch: inspect, plan and report on files"

"$root/tools/stranger.sh" "$wheel"
