#!/usr/bin/env bash
# Builds the wheel and uses it in two clean environments, away from the source: without torch it reads, plans and reports
# on files; beside torch it goes through the tutorial, from doctor to a trained step under half of the memory.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

python3 -m venv "$room/build"
"$room/build/bin/pip" install --quiet build
"$room/build/bin/python" -m build --quiet --wheel --outdir "$room/dist" "$root"
wheel=$(echo "$room"/dist/*.whl)
cp tests/formats/samples/{chainer.txt,onnx.onnx,torch_trace.json,torch_snapshot.pickle} "$room"
"${PYTHON:-python3}" -c "
from pathlib import Path
from tests.support.snippets import program_of
Path('$room/tutorial.py').write_text(program_of(Path('docs/tutorial.md')))"

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

python3 -m venv trains
trains/bin/pip install --quiet torch==2.13.0
trains/bin/pip install --quiet "$wheel[torch]"
trains/bin/python -c "import torch; assert torch.__version__.startswith('2.13.0'), 'the torch that was there was replaced'"
export XDG_CACHE_HOME=$room/cache OMP_NUM_THREADS=1
trains/bin/python tutorial.py >/dev/null
trains/bin/stowplan demo gpt --no-open >/dev/null
test -s stowplan-demo/gpt.html
echo "beside torch: the tutorial, to a trained step under half of the memory; the demo"
