"""All benchmarks, one after the other, each in its own process: `python -m benchmarks [--quick]`"""

import subprocess
import sys

NAMES = ("batches", "storage", "metadata", "objects", "layouts", "scaling", "work", "broker", "console")

if __name__ == "__main__":
    for name in NAMES:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=True)
