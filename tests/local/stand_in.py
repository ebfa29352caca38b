"""A child process that behaves like a worker to its supervisor: stage lines, /ready, signals. Run by path.

stand_in.py PORT [--ready-after FILE] [--exit-with N] [--stubborn] [--say TEXT]… (unknown arguments are ignored)
"""

import argparse
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from pdserve.addresses import listen_on, take_passed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--pid", type=int, default=os.getpid())
    parser.add_argument("--ready-after", type=Path)
    parser.add_argument("--exit-with", type=int)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--say", action="append", default=[])
    options, _ = parser.parse_known_args()
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("pdserve-stage: loading the weights", flush=True)
    for line in options.say:
        print(line, file=sys.stderr, flush=True)
    if options.exit_with is not None:
        sys.exit(options.exit_with)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_ready = options.ready_after is None or options.ready_after.exists()
            self.send_response(200 if is_ready else 503)
            self.end_headers()
            self.wfile.write(
                json.dumps({"ready": is_ready, "reason": "ready", "message": "", "pid": options.pid}).encode()
            )

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", options.port), Handler, bind_and_activate=False)
    held = take_passed("METRICS_PORT") or take_passed("PORT")
    if held is not None:
        server.socket.close()
        server.socket = listen_on(held, 16)
        held.setblocking(True)
    else:
        server.server_bind()
        server.server_activate()
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
