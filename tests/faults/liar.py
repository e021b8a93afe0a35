"""A real MLflow server behind a proxy that lies: it drops, delays, garbles or refuses a request, or carries it out and claims that it failed.

python liar.py FOLDER     prints the proxy's address; ends when its standard input does
"""

import contextlib
import http.server
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

HONEST = 0.75


class Liar(http.server.BaseHTTPRequestHandler):
    """One request."""

    behind = ""
    chance = random.Random(0)

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        lie = "" if self.chance.random() < HONEST else self.chance.choice(["drop", "late", "500", "503", "garbage", "cut", "done but dropped", "done but 500"])
        if lie == "late":
            time.sleep(self.chance.random())
        status, answer = self._ask(body) if lie in ("", "late", "cut", "done but dropped", "done but 500") else (200, b"")
        match lie:
            case "drop" | "done but dropped":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            case "500" | "503" | "done but 500":
                status, answer = int(lie[-3:]), b"no"
            case "garbage":
                answer = self.chance.randbytes(200)
            case _:
                pass
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer[: len(answer) // 2] if lie == "cut" else answer)
        self.close_connection = True

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _ask(self, body: bytes) -> tuple[int, bytes]:
        headers = {name: self.headers[name] for name in ("Content-Type",) if name in self.headers}
        request = urllib.request.Request(self.behind + self.path, data=body or None, headers=headers, method=self.command)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


def main(folder: Path) -> None:
    """Serve until standard input ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "artifacts")]
    quiet = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "UVICORN_LOG_LEVEL": "error"}
    quiet.pop("LD_PRELOAD", None)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=open(folder / "server.log", "w"), start_new_session=True, env=quiet)  # noqa: SIM115
    try:
        Liar.behind = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{Liar.behind}/health", timeout=2):
                break
            time.sleep(0.1)
        proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        print(f"http://127.0.0.1:{proxy.server_address[1]}", flush=True)
        sys.stdin.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
        server.wait(20)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
