"""All studies one after the other, then their page: `python -m benchmarks.suite short|long`.

The short suite takes five minutes, the long one hours, so `--only` runs a part. Each study is a process of
its own, so that none finds what another left in memory.
"""

import argparse
import subprocess
import sys
from time import perf_counter

from benchmarks.results import ROOT

SUITES = {
    "short": (
        "projection unet resnet50 gpt vit",
        "peers vit --batch 4 --rounds 5 --no-inductor",
        "planning --shallow",
        "latency --case hopeless",
        "offload time vit --shares 0.1",
        "shards memory",
    ),
    "long": (
        "projection",
        "projection --size real unet resnet50 gpt vit",
        "projection --optimizers unet resnet50 gpt vit",
        "peers resnet50",
        "peers vit",
        "peers --kernels compiled",
        "tiles unet",
        "tiles gpt",
        "tiles vgg16",
        "tiles resnet50-2048",
        "tiles unet3d-large",
        "planning",
        "lengths",
        "lengths --quality",
        "latency",
        "guards",
        "iteration",
        "iteration --model gpt2",
        "offload time",
        "offload joint",
        "shards memory",
        "shards scaling",
    ),
}


def main() -> int:
    """Run a suite; 1 if a study failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("size", choices=tuple(SUITES))
    studies = sorted({words.split()[0] for suite in SUITES.values() for words in suite})
    parser.add_argument("--only", nargs="+", choices=studies, default=studies, help="these studies alone")
    options = parser.parse_args()
    begun, failed = perf_counter(), 0
    chosen = [words for words in SUITES[options.size] if words.split()[0] in options.only]
    for words in (*chosen, "page"):
        print(f"\n== python -m benchmarks.{words} (after {perf_counter() - begun:.0f} s)", flush=True)
        failed += bool(
            subprocess.run([sys.executable, "-m", *f"benchmarks.{words}".split()], cwd=ROOT).returncode
        )
    print(f"\n{ROOT}/build/bench/index.html, after {perf_counter() - begun:.0f} s; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
