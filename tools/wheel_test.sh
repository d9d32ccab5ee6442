#!/usr/bin/env bash
# Builds the wheel and uses it in two clean environments, away from the source: without torch it reads, plans and reports
# on files, with the library in C and, from the wheel for all platforms, without; beside torch it goes through what the
# README and the tutorial tell a newcomer to do (tools/stranger.sh).
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
STOWPLAN_NATIVE=0 "$room/build/bin/python" -m build --quiet --no-isolation --wheel --outdir "$room/pure" "$root"
pure=$(echo "$room"/pure/stowplan-*-py3-none-any.whl)
cp tests/formats/samples/{chainer.txt,onnx.onnx,torch_trace.json,torch_snapshot.pickle} examples/data/unet_step.txt "$room"

cd "$room"
python3 -m venv plain
plain/bin/pip install --quiet "$wheel"
for file in chainer.txt onnx.onnx torch_trace.json torch_snapshot.pickle; do
    plain/bin/stowplan inspect "$file" >/dev/null
done
plain/bin/stowplan plan chainer.txt --saved retain --budget 1GiB -o plan.json >/dev/null
plain/bin/stowplan report plan.json -o page.html >/dev/null
if command -v cc >/dev/null; then
    plain/bin/stowplan doctor >said || true
    grep -Eq "planning in C +yes" said || { echo "the wheel has no library"; exit 1; }
    plain/bin/stowplan plan unet_step.txt --saved retain --budget 4GiB -o c.json >/dev/null
    plain/bin/pip install --quiet --force-reinstall --no-deps "$pure"
    plain/bin/stowplan plan unet_step.txt --saved retain --budget 4GiB -o python.json 2>said >/dev/null
    grep -q "planning is slower" said || { echo "nothing says that there is no library"; exit 1; }
    cmp c.json python.json || { echo "C and Python make two plans"; exit 1; }
fi
plain/bin/stowplan doctor && { echo "doctor finds torch where there is none"; exit 1; }
! plain/bin/python -c "import torch" 2>/dev/null
echo "without torch: inspect, plan and report on files"

"$root/tools/stranger.sh" "$wheel"
