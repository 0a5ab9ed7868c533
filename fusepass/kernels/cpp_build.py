"""Builds generated C++ with Inductor's own compiler settings, instruction set, code cache and compile pool.

Inductor compiles for the very CPU it runs on, but names a library by its source and command line alone. A cache
directory that another machine also uses would therefore hand out code that this CPU may not run, so the source that is
built names the CPU and the compiler.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

from ..row_program import RowProgram
from . import cpp_code

log = logging.getLogger(__name__)

Kernel = Callable[..., None]
"""Takes the arguments of `cpp_code.argument_types`: tensors for pointers, ints for the rest."""


def start(program: RowProgram) -> Callable[[], Kernel]:
    """Begin building the kernel in the background; the returned function waits for it and loads it.

    Raises whatever Inductor raises when there is no compiler or it fails: at once or on waiting.
    """
    from .._torch_compat import start_cpp_build

    source = f"// Built for {machine()}\n{cpp_code.generate(program)}"
    log.debug("building kernel %s", program.digest)
    wait: Callable[[], Any] = start_cpp_build(cpp_code.argument_types(program), source)
    return wait


@cache
def machine() -> str:
    """A name for this CPU and compiler: equal only where a library built for one runs on the other."""
    from .._torch_compat import cpp_compiler_version

    facts = f"{platform.machine()} {platform.processor()} {_cpu_flags()}"
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    compiler = hashlib.sha256(cpp_compiler_version().encode()).hexdigest()[:16]
    return f"{platform.machine()} CPU {digest}, compiler {compiler}"


def _cpu_flags() -> str:
    """What identifies the CPU's instruction set: the model and the feature flags of its first core, on Linux."""
    if not os.path.exists("/proc/cpuinfo"):
        return platform.platform()
    with open("/proc/cpuinfo") as file:
        first_core = file.read().split("\n\n")[0].splitlines()
    names = ("flags", "Features", "model", "model name", "cpu family", "CPU implementer", "CPU part", "vendor_id")
    return "\n".join(line for line in first_core if line.split(":")[0].strip() in names)
