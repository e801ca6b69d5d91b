"""Programs of a few lines that play a round's part without torch: Python starts in hundredths of a second."""

from __future__ import annotations

import sys
from pathlib import Path

# Doubles B of each module by the format of safetensors alone: a header, then the tensors.
DOUBLING = """
import array, json, os, pathlib, shutil, struct
here = pathlib.Path(os.environ["FEDLORA_ROUND"])
said = json.loads((here / "round.json").read_text())
shutil.copytree(here / "start", here / "result")
file = here / "result" / "adapter_model.safetensors"
raw = file.read_bytes()
size = 8 + struct.unpack("<Q", raw[:8])[0]
header = json.loads(raw[8:size])
out = bytearray(raw)
for name, entry in header.items():
    if "lora_B" in name and "B" in said["trains"]:
        begin, end = (size + at for at in entry["data_offsets"])
        values = array.array("f", raw[begin:end])
        out[begin:end] = array.array("f", [2 * v for v in values]).tobytes()
file.write_bytes(out)
(here / "result.json").write_text(json.dumps({"examples": 30, "loss": 1 / said["round"], "base": said["base"]}))
print("done", said["client"])
"""


def command(folder: Path, text: str, *words: str) -> list[str]:
    """The command of a program, which is written into the folder."""
    (folder / "program.py").write_text(text)
    return [sys.executable, "-S", str(folder / "program.py"), *words]
