"""What a figure may depend on and an artifact may not: the processor, its threads, the builds of numpy and torch."""

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.util.process import processors

_CPU: Final = Path("/proc/cpuinfo")
_LONGEST: Final = 4000  # characters of a document's text


def surroundings() -> dict[str, str]:
    """No host, user or path is in it. torch is told of where it has answered too."""
    import numpy as np

    built: Any = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    found = {
        "processor": _processor(),
        "machine": platform.machine(),
        "processors": str(processors()),
        "features": " ".join(built.get("SIMD Extensions", {}).get("found", ())),
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        "numpy": np.__version__,
    }
    found |= {name: os.environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name in os.environ}
    if (torch := sys.modules.get("torch")) is not None:
        found |= {
            "torch": str(torch.__version__),
            "torch threads": str(torch.get_num_threads()),
            "torch capability": torch.backends.cpu.get_cpu_capability(),
        }
    return {name: "".join(filter(str.isprintable, text))[:_LONGEST] for name, text in found.items()}


def _processor() -> str:
    with suppress(OSError):
        for line in _CPU.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
