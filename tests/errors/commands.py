"""Command lines that are refused, and the folder in which they are typed."""

import gzip
import json
from pathlib import Path

_SAMPLES = Path(__file__).parents[1] / "formats" / "samples"
FILES = (
    *("chainer.txt", "megengine.json", "onnx.onnx", "regiongraph.txt", "stow.json", "stow_heap.json"),
    *("tensorflow.txt", "text.txt", "tilelog.txt", "torch_snapshot.pickle", "torch_trace.json"),
)

_STEPS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().mean()

class Reads(Net):
    def forward(self, x):
        return super().forward(x) * x.max().item()

def step(batch=64): return Net(), (torch.randn(batch, 16),)
def reads(): return Reads(), (torch.randn(64, 16),)
def frozen(): return Net().requires_grad_(False), (torch.randn(64, 16),)
def nothing(): pass
def model(): return Net()
def fails(): raise KeyError("config")
def needs(size): return Net(), (torch.randn(size, 16),)
def other(batch=64): return Net(), (torch.randn(batch, 15),)
def optimizer(model): return "adam"
def loss(): return Net(), (torch.randn(64, 16),), {}, "total"
number = 3
"""


def prepare(folder: Path) -> None:
    """The files that the command lines name."""
    for name in FILES:
        (folder / name).write_bytes((_SAMPLES / name).read_bytes())
    (folder / "train.py").write_text(_STEPS)
    (folder / "broken.py").write_text("def step(:\n")
    (folder / "lacking.py").write_text("import there_is_no_such_package\n")
    (folder / "folder").mkdir()
    (folder / "a file").write_text("hello\n")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_bytes(b" \n\t\n")
    (folder / "notes.md").write_text("# Notes\n")
    (folder / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (folder / "latin.txt").write_bytes("108 120\nGrün".encode("latin-1"))
    (folder / "trace.json.gz").write_bytes(gzip.compress(b"{}", mtime=0))
    (folder / "weights.pt").write_bytes(b"PK\x03\x04\0\0archive/data.pkl")
    (folder / "gone.txt").symlink_to(folder / "nowhere.txt")
    (folder / "noops.stow.txt").write_text("stowplan graph 1\n")
    (folder / "half.stow.json").write_text((_SAMPLES / "stow.json").read_text()[:100])
    (folder / "half.plan.json").write_text('{"format":"stowplan.plan","version":1,"digest":"00')
    (folder / "old.plan.json").write_text('{"format":"stowplan.plan","version":99,"digest":"","content":{}}')
    (folder / "sealed.plan.json").write_text(
        '{"format":"stowplan.plan","version":5,"digest":"","content":{}}'
    )
    (folder / "list.json").write_text("[1, 2]")
    (folder / "peers.json").write_text(json.dumps({"peers": 3}))
    (folder / "machine.toml").write_text("[compute]\nmacs_per_second = -1\n")
    (folder / "typo.toml").write_text("[computer]\nmacs_per_second = 1e12\n")
    (folder / "torn.toml").write_text("[compute\n")
    (folder / "card.toml").write_text(
        'name = "mine"\nmemory = "much"\nbandwidth = 1e12\nflops = {float32 = 1e13}\n'
    )
    (folder / "card2.toml").write_text('name = "mine"\nmemory = "8GiB"\n')


_LONG = "x" * 300

ON_FILES = (
    # misspelt
    *(
        "",
        "plna chainer.txt",
        "plan",
        "plan chainer.txt",
        "plan chainer.txt --budgt 1GiB",
        "inspect",
        "compare x",
    ),
    *(
        "inspect chainer.txt stow.json",
        "convert stow.json",
        "report stow.json",
        "explain",
        "simulate stow.json",
    ),
    *(
        "plan chainer.txt --budget",
        "plan chainer.txt --json=1 --budget 1GiB",
        "frontier chainer.txt",
        "-x",
        "demo unt",
    ),
    # what is read
    *(
        f"inspect {name}"
        for name in (
            *(
                "nothing.txt",
                "folder",
                "empty.txt",
                "blank.txt",
                "notes.md",
                "photo.png",
                "latin.txt",
                "gone.txt",
            ),
            *(
                "trace.json.gz",
                "weights.pt",
                "train.py",
                "half.stow.json",
                "list.json",
                "half.plan.json",
                "a+file",
            ),
            *(
                "https://example.org/step.txt",
                f"{_LONG}.txt",
                "train",
                "train:",
                ":step",
                "train.step",
                "machine.toml",
            ),
        )
    ),
    *(f"{verb} nothing.txt {more}" for verb, more in (("plan", "--budget 1GiB"), ("plan", "--frontier"))),
    *(
        "convert nothing.txt x.stow.json",
        "report nothing.txt -o x.html",
        "simulate nothing.txt --mesh data=2",
    ),
    *("compare nothing.txt chainer.txt", "compare chainer.txt nothing.txt", "compare chainer.txt empty.txt"),
    *(
        "explain nothing.json",
        "explain folder",
        "explain chainer.txt",
        "explain photo.png",
        "explain half.plan.json",
    ),
    *("explain old.plan.json", "explain sealed.plan.json", "explain list.json", "explain empty.txt"),
    *(
        "check nothing.txt --budget 1GiB",
        "fit-largest nothing.txt --budget 1GiB",
        "plan folder --budget 1GiB",
    ),
    *(
        "plan noops.stow.txt --budget 1GiB",
        "plan noops.stow.txt --frontier",
        "simulate noops.stow.txt --mesh data=2",
    ),
    # budgets
    *(
        f"plan chainer.txt --budget {budget}"
        for budget in (
            "six",
            "6gigs",
            "-1",
            "1.5",
            "NaN",
            "inf",
            "1e99",
            "50%",
            "auto",
            "6,5GiB",
            "GiB",
            "0x10",
            "0",
        )
    ),
    *(f"plan megengine.json --budget {budget}" for budget in ("1", "500")),
    *("plan chainer.txt --budget 1KiB --training"),
    # options
    *(
        f"plan chainer.txt --budget 1GiB {more}"
        for more in (
            *(
                "--allow magic",
                "--allow recompute,tiles",
                "--prefer luck",
                "--kernels fast",
                "--kernels compiled",
            ),
            *(
                "--gap wide",
                "--gap -1",
                "--gap nan",
                "--gap inf",
                "--time-limit soon",
                "--time-limit 0",
                "--time-limit -2",
            ),
            *(
                "--saved all",
                "--layouts best",
                "--arena",
                "--optimizer adam",
                "--clip-norm 1",
            ),
            *(
                "--accumulate 2",
                "--accumulate two",
                "--allocator rocm",
                "--allocator cuda,expandable",
                "--held-blocks",
            ),
            *(
                "--allocator cuda,max_split_size_mb:x",
                "--allocator cuda,nonsense:1",
                "--allocator cuda,garbage_collection_threshold:7",
            ),
            *(
                "--device a100-80gb",
                "--device a100",
                "-o no/plan.json",
                "-o folder",
                "-o a+file/plan.json",
                "-o /dev/full",
            ),
        )
    ),
    *(
        "plan chainer.txt --device a100-80gb",
        "plan chainer.txt --allocator cuda",
        "plan chainer.txt --held-blocks",
    ),
    *("plan stow.json --budget 1GiB --saved listed", "plan chainer.txt --frontier --arena"),
    *("inspect stow.json --saved retain", "inspect chainer.txt --saved all", "inspect chainer.txt --measure"),
    *(
        "inspect chainer.txt --device a100-80gb",
        "inspect chainer.txt --optimizer adam",
        "inspect chainer.txt --layouts best",
    ),
    *(
        "inspect megengine.json --layouts chosen",
        "inspect chainer.txt --training",
        "inspect torch_trace.json --training",
    ),
    # writing
    *(
        f"convert {words}"
        for words in (
            *(
                "stow.json x.txt",
                "stow.json no/x.stow.json",
                "stow.json folder --to stow",
                "stow.json /dev/full --to stow",
            ),
            *(
                "stow.json x --to onnx",
                "tilelog.txt x --to chainer",
                "regiongraph.txt x --to tilelog",
            ),
            *(
                "stow.json x --to chainer",
                "text.txt x --to regiongraph",
                "photo.png x.stow.json",
                "stow_heap.json x.stow.txt",
            ),
        )
    ),
    *(
        f"report {words}"
        for words in (
            *(
                "stow.json -o x",
                "stow.json -o x.pdf",
                "stow.json -o no/x.html",
                "stow.json -o folder/",
                "empty.txt -o x.html",
            ),
            *(
                "stow.json -o a+file/x.html",
                "stow.json -o x.html --peers nothing.json",
                "stow.json -o x.html --peers peers.json",
            ),
            *(
                "stow.json -o x.html --peers photo.png",
                "stow.json chainer.txt -o x.svg",
                "list.json -o x.png",
            ),
            *(
                "half.plan.json -o x.html",
                "stow.json",
            ),
        )
    ),
    # meshes
    *(
        f"simulate regiongraph.txt {words}"
        for words in (
            *(
                "--mesh rings=2",
                "--mesh data",
                "--mesh data=0",
                "--mesh data=-2",
                "--mesh data=two",
                "--mesh data=2,data=2",
            ),
            *(
                "--mesh data=",
                "--mesh =2",
                "--mesh ,",
                "--mesh data=999999999",
                "--mesh space=2x2x2x2",
                "--mesh model=3",
            ),
            *(
                "--workers 0",
                "--workers -1",
                "--workers many",
                "--workers 7",
                "--mesh data=2 --workers 2",
                "--mesh sequence=4",
            ),
            *(
                "--mesh data=2 --machine nothing.toml",
                "--mesh data=2 --machine machine.toml",
                "--mesh data=2 --machine typo.toml",
            ),
            *(
                "--mesh data=2 --machine torn.toml",
                "--mesh data=2 --machine photo.png",
                "--mesh data=2 --layouts",
            ),
            *(
                "--mesh data=2 --layouts --parameters shard",
                "--workers 2 --parameters shard",
                "--mesh data=2 --budget six",
            ),
            *(
                "--workers 2 --budget 1kB",
                "--mesh data=2 --regions no/x.txt",
                "--mesh data=2 --regions folder",
            ),
            *(
                "--mesh data=2 --regions /dev/full",
                "--mesh data=2 --layouts --regions x.txt",
                "--mesh data=2 --up-to few",
            ),
            *("--mesh data=2 --parameters some",),
        )
    ),
    *(
        f"simulate {name} --mesh data=2"
        for name in ("torch_snapshot.pickle", "torch_trace.json", "tilelog.txt")
    ),
    # verbs that run a step
    *(
        f"{verb} chainer.txt {more}"
        for verb, more in (
            *(
                ("check", "--budget 1GiB"),
                ("check", ""),
                ("check", "--plan half.plan.json"),
                ("fit-largest", "--budget 1GiB"),
            ),
            *(
                ("fit-largest", ""),
                ("fit-largest", "--device a100-80gb"),
                ("check", "--budget 1GiB --steps two"),
            ),
        )
    ),
)
"""What needs no PyTorch."""

WITHOUT_TORCH = (
    *(
        "plan train:step --budget 1GiB",
        "plan train:step --frontier",
        "inspect train:step",
        "check train:step --budget 1GiB",
    ),
    *(
        "fit-largest train:step --budget 1GiB",
        "simulate train:step --mesh data=2",
        "gpu-check",
        "demo --no-open",
    ),
    *("plan train:step --device a100-80gb", "inspect train:step --optimizer adam", "demo unet --no-open"),
)
"""Where PyTorch is not installed."""

ON_STEPS = (
    *(
        f"inspect train:{name}"
        for name in (
            *(
                "none",
                "number",
                "nothing",
                "model",
                "fails",
                "needs",
                "other",
                "reads",
                "loss",
                "Net",
                "stepp",
            ),
        )
    ),
    *(
        "inspect nowhere:step",
        "inspect broken:step",
        "inspect lacking:step",
        "inspect .:step",
        "inspect train:step --layouts chosen",
    ),
    *(
        "inspect train:step --optimizer adm",
        "inspect train:step --optimizer train:optimizer",
        "inspect train:step --optimizer train:none",
    ),
    *(
        "inspect train:step --optimizer lbfgs",
        "inspect train:step --device a100",
        "inspect train:step --device card.toml",
    ),
    *(
        "inspect train:step --device card2.toml",
        "inspect train:step --device torn.toml",
        "inspect train:step --device nothing.toml",
    ),
    "inspect train:step --device a100-80gb --measure",
    *(
        f"plan train:step {words}"
        for words in (
            *(
                "",
                "--budget 1kB",
                "--budget 1kB --json",
                "--budget six",
                "--budget 1GiB -o no/plan.json",
                "--budget 1GiB --gap -1",
            ),
            *(
                "--budget 1GiB --accumulate 2",
                "--budget 1GiB --optimizer adam --accumulate 0",
                "--budget 1GiB --optimizer adm",
            ),
            *(
                "--budget 1GiB --optimizer adam --clip-norm -1",
                "--budget 1GiB --optimizer lbfgs",
                "--budget 1GiB --layouts chosen",
            ),
            *(
                "--budget 1GiB --arena --frontier",
                "--budget 1GiB --device a100-80gb --arena",
                "--budget 1GiB --device b200",
            ),
            *(
                "--budget 1GiB --device a100-80gb --kernels compiled",
                "--device a100-80gb --allow tile",
                "--device a100-80gb --clip-norm 1",
            ),
            *(
                "--budget 1kB --device a100-80gb",
                "--budget 1GiB --allow offload-gradients --optimizer adam",
                "--budget 1GiB --saved listed",
            ),
        )
    ),
    "plan train:frozen --budget 1KiB",
    *(
        f"check train:step {words}"
        for words in (
            *(
                "",
                "--budget 1kB",
                "--budget 1GiB --steps 0",
                "--budget 1GiB --steps -1",
                "--plan nothing.json",
                "--plan chainer.txt",
            ),
            *(
                "--plan half.plan.json",
                "--budget 1GiB -o no/run.json",
                "--budget 1GiB --clip-norm 1",
                "--budget 1GiB --allow magic",
            ),
            *("--budget 1GiB --optimizer sgdd",),
        )
    ),
    *(
        f"fit-largest train:step {words}"
        for words in (
            *(
                "",
                "--budget 1GiB --vary resolution",
                "--budget 1GiB --first 0",
                "--budget 1GiB --first 8 --multiple 0",
            ),
            *(
                "--budget 1GiB --first 8 --most 4",
                "--budget 1GiB --allow magic",
                "--budget 1GiB --device a100",
                "--budget 1GiB --first 8 --moves -1 --most 8",
            ),
        )
    ),
    "fit-largest train:needs --budget 1GiB",
    *(
        f"simulate train:step {words}"
        for words in ("--mesh space=2", "--mesh data=128", "--mesh rings=2", "--mesh data=2 --layouts")
    ),
    *(
        "gpu-check --device cuda:9",
        "gpu-check --device disk",
        "gpu-check --networks gpd",
        "gpu-check -o nowhere",
        "demo -o a+file",
    ),
)
"""What needs PyTorch."""
