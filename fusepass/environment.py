"""What a run depends on: versions, devices and the C++ compiler, as `python -m fusepass env` prints them."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata

import torch


def describe() -> dict[str, str]:
    """One line per fact, in the order in which they read well. Facts that this machine lacks are told as such."""
    return {
        "fusepass": _version("fusepass"),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "CPU": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "C++ compiler": _compiler_version(),
        "GPU": gpu_name() or "none",
    }


def missing_for_cpu() -> str | None:
    """What Inductor lacks to compile C++ kernels on this machine, with what to do about it; None if nothing."""
    if find_compiler() is None:
        return "no C++ compiler: Inductor needs g++ or clang++ (Debian, Ubuntu: apt install g++), or set CXX"
    if not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"no Python.h: Inductor needs Python's headers (Debian, Ubuntu: apt install python{version}-dev)"
    return None


def find_compiler() -> str | None:
    """The compiler that Inductor will use: CXX, or the first of g++ and clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def cpu_name() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpu_name() -> str | None:
    """The first GPU's name, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def slug(device: str) -> str:
    """The name of a device ("cpu" or "cuda") as part of a file's name: "nvidia-h200"."""
    name = (gpu_name() if device.startswith("cuda") else cpu_name()) or device
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _compiler_version() -> str:
    compiler = find_compiler()
    if compiler is None:
        return "none"
    out = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return out.stdout.partition("\n")[0] or compiler
