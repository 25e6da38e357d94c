"""What AWS's compiler has put into its own cache, file by file, so that other caches can be given the same."""

from pathlib import Path

from nxpipe.pipeline.artifacts.artifact_files import cached
from nxpipe.pipeline.artifacts.neuron_cache.entry import State, folder_of, state_of, travels


def cache_entries(cache: Path, program: str) -> dict[str, bytes]:
    """Finished entries, by their files' paths in an artifact. Mostly none: tracing is documented not to be cached."""
    found: dict[str, bytes] = {}
    for folder in sorted(cache.glob("*/*/")):
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if state_of([path.name for path in files]) is State.READY:
            for path in files:
                where = path.relative_to(cache).as_posix()
                if folder_of(where) and travels(path.name):
                    found[cached(program, where)] = path.read_bytes()
    return found
