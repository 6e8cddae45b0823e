"""Compute the size of the image with torch's CUDA build from tables of contents, without downloading it.

    python3.12 -m pip install --dry-run --ignore-installed --use-feature=fast-deps --report report.json \\
        -c constraints.txt torch==2.13.0
    python benchmarks/container_size.py report.json CPU_WHEEL

`container.json`, which `benchmarks/container.py` writes beside this script, has the layers of an image with
torch's CPU build; CPU_WHEEL is that build's file. The tables of contents of the CUDA build's wheels, and of
those beyond the lock, come from the registry: some hundred kilobytes each.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from pathlib import Path

import httpx2

HERE = Path(__file__).parent


class Remote(io.RawIOBase):
    """A file on a server that fetches only the parts that are read."""

    def __init__(self, client: httpx2.Client, url: str):
        self.client, self.url, self.place = client, url, 0
        self.size = int(client.head(url).raise_for_status().headers["content-length"])

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def read(self, count: int = -1) -> bytes:
        end = self.size if count < 0 else min(self.place + count, self.size)
        if end <= self.place:
            return b""
        answer = self.client.get(self.url, headers={"Range": f"bytes={self.place}-{end - 1}"})
        if answer.status_code != 206:
            raise OSError(f"{self.url} does not support range requests")
        self.place = end
        return answer.content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="pip's report of what it would install")
    parser.add_argument("cpu_wheel", type=Path, help="wheel of the CPU build in the measured image")
    parser.add_argument("--measured", type=Path, default=HERE / "container.json")
    parser.add_argument("--out", type=Path, default=HERE / "container_size.json")
    options = parser.parse_args()
    lock = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (HERE.parent / "constraints.txt").read_text().splitlines()
    }
    wheels = []
    with httpx2.Client(follow_redirects=True, timeout=60) as client:
        for one in json.loads(options.report.read_text())["install"]:
            name, url = one["metadata"]["name"].lower().replace("_", "-"), one["download_info"]["url"]
            if (name == "torch" or name not in lock) and url.startswith("http"):
                file = Remote(client, url)
                wheels.append(
                    {
                        "package": name,
                        "version": one["metadata"]["version"],
                        "wheel": megabytes(file.size),
                        "unpacked": unpacked(file),
                    }
                )
    layers = json.loads(options.measured.read_text())["layers"]
    record = {
        "wheels": sorted(wheels, key=lambda wheel: -wheel["unpacked"]),
        "wheels_total": sum(w["wheel"] for w in wheels),
        "unpacked_total": sum(w["unpacked"] for w in wheels),
        "cpu_wheel": megabytes(options.cpu_wheel.stat().st_size),
        "cpu_unpacked": unpacked(options.cpu_wheel.open("rb")),
        "measured_layers": round(sum(layer["megabytes"] for layer in layers)),
    }
    record["image"] = record["measured_layers"] - record["cpu_unpacked"] + record["unpacked_total"]
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def megabytes(count: int) -> int:
    return round(count / 1e6)


def unpacked(file) -> int:
    """Return the unpacked size of a wheel's files in megabytes."""
    with zipfile.ZipFile(file) as wheel:
        return megabytes(sum(entry.file_size for entry in wheel.infolist()))


if __name__ == "__main__":
    main()
