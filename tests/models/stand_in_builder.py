"""Stands in for the modules that make models: `slow|broken LOG FOLDER`."""

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    kind, log, folder = sys.argv[1:]
    print("building", flush=True)
    Path(folder).mkdir()
    if kind == "broken":
        raise ValueError("the weights are damaged")
    time.sleep(0.3)  # long enough for the second one to arrive
    (Path(folder) / "result").write_text("whole")
    with Path(log).open("a") as stream:
        stream.write("built\n")
