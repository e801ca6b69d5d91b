"""Write the generated parts of docs/reference anew: `python docs/generate`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from generate import pages

for path, text in pages().items():
    if path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"written: {path.name}")
