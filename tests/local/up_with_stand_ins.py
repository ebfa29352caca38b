"""`pdserve up` as a process of its own, whose children are stand-ins. Run by path.

up_with_stand_ins.py HOME_FOLDER MODEL [--stubborn] [argument of up]…
"""

import os
import sys
from pathlib import Path

from pdserve.local.one_machine import OneMachine
from pdserve.local.plan import parse_up

STAND_IN = Path(__file__).parent / "stand_in.py"


def main() -> None:
    home, model, *arguments = sys.argv[1:]
    extra = ["--stubborn"] if "--stubborn" in arguments else []

    def command(role: str, flags: list[str]) -> list[str]:
        values = dict(flag.removeprefix("--").partition("=")[::2] for flag in flags)
        port = values.get("metrics-port") or values["port"]
        return [sys.executable, str(STAND_IN), port, *extra, *flags]

    OneMachine(
        parse_up([f"--model={model}", "--port=0", *(word for word in arguments if word != "--stubborn")]),
        env={name: value for name, value in os.environ.items() if not name.startswith("PDS_")},
        home=Path(home),
        report=lambda who, what: print(f"{who}: {what}", flush=True),
        on_ready=lambda service: print(f"READY {service.url}", flush=True),
        command=command,
    ).run()
    print("stopped", flush=True)


if __name__ == "__main__":
    main()
